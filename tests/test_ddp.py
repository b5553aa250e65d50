"""torch's own DDP, which trainers other than ours use: it copies buffers between processes."""

import pytest
from test_robust import torchrun


@pytest.mark.slow
def test_processes_with_texts_of_unequal_lengths_keep_their_own_tables():
    code, stdout, stderr = torchrun("tests/unequal_lengths.py", "gpt")
    assert code == 0, stderr
    assert stdout.count("the same") == 2
