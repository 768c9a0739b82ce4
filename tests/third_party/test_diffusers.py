"""diffusers' training scripts (``train_text_to_image.py``, ``train_text_to_image_lora.py``), with three models."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.nn import functional as F

import hf_mp
from hf_mp.policy import PrecisionPolicy

pytestmark = pytest.mark.slow

STEPS = 16  # forwards; every second one updates
BATCH, CHANNELS, SIDE = 4, 4, 8
# How far losses, and the way that weights went, may be from FP32's, relative to it; measured 2e-4, 0.02 and 1e-3, 0.07.
TOLERANCES = {torch.float16: (5e-4, 0.05), torch.bfloat16: (3e-3, 0.15)}


@pytest.fixture(scope="module")
def diffusers() -> Any:
    """Imported late: it takes seconds, also where these tests are left out."""
    return pytest.importorskip("diffusers")


def unet(diffusers: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=SIDE, in_channels=CHANNELS, out_channels=CHANNELS, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8, cross_attention_dim=32, attention_head_dim=8,
    )  # fmt: skip


def dit(diffusers: Any) -> Any:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=CHANNELS, out_channels=CHANNELS, num_layers=2,
        norm_num_groups=8, sample_size=SIDE, patch_size=2,
    )  # fmt: skip


def flux(diffusers: Any) -> Any:
    """Its queries and keys go through ``torch.nn.RMSNorm``, and its values do not."""
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4 * CHANNELS, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def predict(name: str, model: Any, noisy: Tensor, time: Tensor, text: Tensor) -> Tensor:
    if name == "unet":
        return model(noisy, time, text, return_dict=False)[0]
    if name == "dit":
        return model(noisy, timestep=time, class_labels=torch.arange(BATCH), return_dict=False)[0]
    half = SIDE // 2
    patches = noisy.view(BATCH, CHANNELS, half, 2, half, 2).permute(0, 2, 4, 1, 3, 5).reshape(BATCH, half**2, -1)
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(float(half)), torch.arange(float(half)))
    found = model(
        hidden_states=patches, timestep=time / 1000, pooled_projections=text[:, 0], encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3), img_ids=places, return_dict=False,
    )[0]  # fmt: skip
    return found.view(BATCH, half, half, CHANNELS, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(noisy.shape)


MODELS = {"unet": unet, "dit": dit, "flux": flux}


def train(diffusers: Any, name: str, precision: str, lora: bool) -> tuple[list[float], Tensor, Any]:
    """The losses, how far diffusers' average of the trained weights moved, and the model, detached."""
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = MODELS[name](diffusers)
    if lora:  # as the script: what is frozen is in 16 bits
        compute = PrecisionPolicy.parse(precision).compute
        model.requires_grad_(False).to(compute)
        config = LoraConfig(r=8, lora_alpha=8, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v"])
        add_adapter = getattr(model, "add_adapter", functools.partial(inject_adapter_in_model, model=model))
        add_adapter(config)
    elif name == "unet":
        model.enable_gradient_checkpointing()
    model.train()
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer: Any = torch.optim.AdamW(parameters, lr=2e-2 if lora else 1e-3)
    runtime = hf_mp.MixedPrecision(precision)
    model = runtime.attach(model)
    optimizer = runtime.attach_optimizer(optimizer)
    scheduler = get_scheduler("constant_with_warmup", optimizer=optimizer, num_warmup_steps=2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    average, start = EMAModel(parameters, decay=0.8), [one.detach().clone() for one in parameters]
    noise_scheduler = diffusers.DDPMScheduler()
    draw = torch.Generator().manual_seed(1)
    latents, noise = torch.randn(2, 2, BATCH, CHANNELS, SIDE, SIDE, generator=draw)
    time, text = torch.tensor([100, 300, 600, 900]), torch.randn(BATCH, 6, 32, generator=draw)
    losses = []
    for step in range(STEPS):
        with accelerator.accumulate(model):
            target = noise[step % 2]
            noisy = noise_scheduler.add_noise(latents[step % 2], target, time)
            loss = F.mse_loss(predict(name, model, noisy, time, text).float(), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.step(parameters)
        losses.append(loss.item())
    taken = 0 if precision == "fp32" else STEPS // 2  # without mixed precision, nobody counts
    assert (runtime.stats.steps, runtime.stats.skipped_steps) == (taken, 0)
    model = accelerator.unwrap_model(model)
    runtime.detach()
    moved = [new - old for new, old in zip(average.shadow_params, start, strict=True)]
    return losses, torch.cat([one.flatten() for one in moved]), model


@functools.cache
def in_fp32(diffusers: Any, name: str, lora: bool) -> tuple[list[float], Tensor, Any]:
    return train(diffusers, name, "fp32", lora)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_in_fp32(diffusers: Any, name: str, lora: bool, precision: str, tmp_path: Path) -> None:
    expected, expected_move, _ = in_fp32(diffusers, name, lora)
    assert sum(expected[-2:]) < 0.97 * sum(expected[:2])
    losses, move, model = train(diffusers, name, precision, lora)
    loss_tolerance, move_tolerance = TOLERANCES[PrecisionPolicy.parse(precision).compute]
    assert losses == pytest.approx(expected, rel=loss_tolerance)
    assert move.dtype is torch.float32
    assert (move - expected_move).norm() <= move_tolerance * expected_move.norm()
    trained = {key: one for key, one in model.named_parameters() if one.requires_grad}
    assert {one.dtype for one in trained.values()} == {torch.float32}
    if not lora:
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(loaded[key], one) for key, one in trained.items())
