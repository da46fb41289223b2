"""What a call still lacks when its module has ended: its documents, rule, projection and gate."""

from __future__ import annotations

from torch import nn

from attnprobe.capture.call import AttentionCall, Gate, Projection, Site
from attnprobe.capture.documents import Documents
from attnprobe.capture.folding import ordered
from attnprobe.capture.gates import GateReader, gate_behind
from attnprobe.capture.pending import Pending
from attnprobe.capture.projection import reordered
from attnprobe.capture.raw import RawCall
from attnprobe.capture.rules import Rules
from attnprobe.capture.sites import Sites
from attnprobe.capture.streams import Streams
from attnprobe.capture.trace import frees_weights

UNTOLD = "its rows are not those of the tokens, whose padding and documents cannot be told in it"
NO_CONSUMER = "no linear map was found that reads the attention output"
TWO_CONSUMERS = "several linear maps read the attention output: which is W_O cannot be told"
REORDERED = "the module merges its heads in an order of its own, which no head's part is read from"
FREED = "the weights of W_O were freed before they could be read"
CHANGED = "a tensor was changed in place after the attention call"


class Completion:
    """Completes the calls of one model.

    Args:
        model: whose calls they are.
        sites: where it is noted which of them were ever seen to look ahead.
    """

    def __init__(self, model: nn.Module, sites: Sites) -> None:
        self._sites = sites
        self._are_freed = any(map(frees_weights, model.modules()))
        self._projections: dict[Site, Projection] = {}
        self._gates = GateReader()
        self.start(Streams({}), Rules())

    def start(self, streams: Streams, rules: Rules) -> None:
        """Sets the documents and the masks of the next pass."""
        self._streams, self._rules = streams, rules

    def of(self, pending: Pending) -> AttentionCall:
        """The call that a pending one has become."""
        spoilt = pending.is_spoilt or not pending.mend()
        raw, site = pending.raw, pending.site
        rows, heads = raw.query.shape[:2]
        if pending.consumed is not None and (pending.was_folded or rows == heads):
            raw = ordered(raw, pending.consumed)  # heads may come first
        queries, keys = self._streams.documents(site, raw)
        reasons: dict[str, str] = {}
        if reason := self._untrusted(pending, raw, queries, keys, spoilt):
            reasons["all"] = reason
        mask = raw.mask
        if "all" not in reasons:
            mask = self._rules.of(mask, queries, keys, is_own=raw.is_matrix)
            has_source = "decoder" in self._streams.by_stack
            other = self._sites.note(site, mask, queries, raw.learned_keys, has_source)
            reasons |= {} if other is None else {"all": other}
        projection = self._projection(pending, raw, reasons)
        gate = self._gate(pending, raw, queries, reasons)
        consumed = pending.consumed
        if reasons.get("gate") == REORDERED:
            projection = consumed = None
            reasons["projection"] = REORDERED
        return AttentionCall(
            site=site,
            query=raw.query,
            key=raw.key,
            value=raw.value,
            output=raw.output,
            scale=raw.scale,
            mask=mask,
            softcap=raw.softcap,
            sinks=raw.sinks,
            is_matrix=raw.is_matrix,
            queries=queries,
            keys=keys,
            projection=projection,
            consumed=consumed,
            gate=gate,
            reasons=reasons,
        )

    def _untrusted(
        self, pending: Pending, raw: RawCall, queries: Documents, keys: Documents, spoilt: bool
    ) -> str | None:
        """Why nothing of a call can be told, or None."""
        streams, site = self._streams, pending.site
        # a loop over samples with a row a head looks like rows of one head
        may_be_heads = pending.was_folded and len(raw.query) > 1
        if pending.consumed is None and not pending.read_twice and may_be_heads:
            return UNTOLD
        if streams.are_other_rows(raw) or streams.are_pieces(site, raw):
            return UNTOLD
        if queries is keys and streams.do_not_tell(site, queries):
            return UNTOLD
        if spoilt:
            return CHANGED
        return raw.problem

    def _projection(
        self, pending: Pending, raw: RawCall, reasons: dict[str, str]
    ) -> Projection | None:
        if pending.read_twice:
            reasons["projection"] = TWO_CONSUMERS
            pending.consumed = None
            return None
        if pending.consumed is None or pending.weight is None:
            reasons["projection"] = NO_CONSUMER
            return None
        known = self._projections.get(pending.site)
        is_same = self._are_freed or (
            known is not None and known.weight.data_ptr() == pending.weight.data_ptr()
        )
        if known is None or not is_same:
            weight = pending.weight.detach()
            if not weight.untyped_storage().size():
                reasons["projection"] = FREED
                pending.consumed = None
                return None
            known = Projection(weight.clone() if self._are_freed else weight, raw.query.shape[1])
            self._projections[pending.site] = known
        return known

    def _gate(
        self, pending: Pending, raw: RawCall, queries: Documents, reasons: dict[str, str]
    ) -> Gate | None:
        if pending.gates:
            return pending.gates[0]
        if pending.consumed is not None:
            found = self._gates.read(
                pending.site,
                pending.frame.module,
                pending.around,
                raw.query,
                raw.output,
                pending.consumed,
                queries.valid,
            )
            if isinstance(found, Gate):
                return found
            if isinstance(found, str):
                is_other = reordered(pending.consumed, raw.output)
                reasons["gate"] = REORDERED if is_other else found
                return None
        for behind in map(gate_behind, pending.holders):
            if isinstance(behind, Gate):
                return behind
            if behind is not None:
                reasons["gate"] = behind
        return None
