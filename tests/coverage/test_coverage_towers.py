"""Vision towers: the pieces that they attend in are one call over several documents."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")

from eager import figures, watched
from measured import scanned
from towers import IMAGES, TOWERS, patches, tower


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["default", "eager"])
@pytest.mark.parametrize("name", TOWERS)
def test_figures_of_pieces_are_those_of_their_own_weights(name: str, implementation: str) -> None:
    eager = tower(name, attn_implementation="eager")
    model = eager
    if implementation == "default":
        model = tower(name)
        model.load_state_dict(eager.state_dict())
    scan = scanned(model, patches(model), grid_thw=IMAGES)
    weights = watched(eager, scan.args, scan.kwargs)
    pieces: dict[str, list[torch.Tensor]] = {}
    for site, own in weights.items():
        pieces.setdefault(site.partition("#")[0], []).append(own)
    assert set(pieces) == set(scan.calls)
    for site, owns in pieces.items():
        stats = scan.calls[site].stats
        assert len(owns) > 1
        start = 0
        for own in owns:
            real = torch.ones(1, own.shape[-1], dtype=torch.bool)
            expected = figures(own, real, real)
            part = slice(start, start := start + own.shape[-1])
            for figure in ("first", "entropy", "mass"):
                ours = getattr(stats, figure)[..., part].double()
                torch.testing.assert_close(ours, getattr(expected, figure), rtol=1e-5, atol=1e-5)
        assert start == stats.first.shape[-1]
