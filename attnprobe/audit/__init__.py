"""The verdict: checkpoints gathered, judged against rules and a baseline, reported."""
