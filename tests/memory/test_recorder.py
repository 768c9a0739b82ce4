import pytest
import torch
from torch import nn

from hf_mp.memory.ledger import Category, Phase
from hf_mp.memory.recorder import MemoryRecorder


def test_what_lies_where_a_weight_was_is_no_weight():
    """bitsandbytes' layers replace the memory of a bias at the first forward."""
    model, recorder = nn.Linear(4, 4), MemoryRecorder(torch.device("cpu"))
    with recorder.following(model), recorder:
        recorder.start_phase(Phase.FORWARD)
        address = model.bias.untyped_storage()._cdata
        weight = model.weight.half()
        model.bias.data = model.bias.data.half()
        values = [torch.ones(4) for _ in range(20)]  # one of which takes the address again
        rounded = [value.half() for value in values]
        assert address in {value.untyped_storage()._cdata for value in values}
    live = recorder.ledger.live
    assert live[weight.untyped_storage()._cdata].category is Category.WORKING_COPIES
    assert {live[one.untyped_storage()._cdata].category for one in rounded} == {Category.ACTIVATIONS}


@pytest.mark.parametrize(
    ("size_bytes", "counted_bytes"),
    [(1, 512), (512, 512), (2**20 + 1, 2**20 + 512), (2**23 + 2**20, 2**23 + 2**20),
     (12 * 2**20 - 5, 12 * 2**20), (11 * 2**20, 12 * 2**20), (11 * 2**20 - 512, 11 * 2**20 - 512)],
)  # fmt: skip
def test_a_gpu_counts_what_its_allocator_does(size_bytes, counted_bytes):
    recorder = MemoryRecorder(torch.device("meta"))
    recorder.take([tensor := torch.empty(size_bytes, dtype=torch.uint8, device="meta")], Category.TEMPORARIES)
    assert recorder.ledger.live[tensor.untyped_storage()._cdata].size_bytes == counted_bytes
