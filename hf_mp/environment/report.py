"""The output of ``hf-mp env``, as a screen and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.environment.advice import Advice, Capabilities, advise
from hf_mp.environment.libraries import Library, bitsandbytes_status, triton_status
from hf_mp.environment.machine import describe_hardware, gpu_count, package_versions
from hf_mp.environment.products import Product, time_products
from hf_mp.policy import PRESETS


@dataclass(frozen=True)
class Machine:
    versions: dict[str, str]
    hardware: dict[str, str]
    libraries: list[Library]
    products: list[Product]  # one in each dtype, on each device
    advice: Advice

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def examine_machine() -> Machine:
    """Query the libraries and time the products; takes seconds. Initializes CUDA if there is a GPU."""
    libraries = [bitsandbytes_status(), triton_status()]  # before anything else imports them, and lets them print
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpu_count()))]
    return Machine(
        versions=dict(package_versions()),
        hardware=dict(describe_hardware()),
        libraries=libraries,
        products=[product for device in devices for product in time_products(device)],
        advice=advise(capabilities()),
    )


def capabilities() -> Capabilities:
    cpu_fp16, cpu_bf16 = (runs_natively(PRESETS[name].compute, "cpu") for name in ("fp16", "bf16"))
    if not torch.cuda.is_available():
        return Capabilities(cpu_fp16=cpu_fp16, cpu_bf16=cpu_bf16)
    weakest = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
    capability = None if torch.version.hip is not None else torch.cuda.get_device_capability(weakest)
    gpu_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Capabilities(torch.cuda.get_device_name(weakest), capability, gpu_bf16, cpu_fp16, cpu_bf16)


def screen(machine: Machine) -> Iterator[RenderableType]:
    libraries = {library.name: library.status for library in machine.libraries}
    environment = Table("environment", "value", show_edge=False)
    for label, value in (machine.versions | libraries | machine.hardware).items():
        environment.add_row(label, Text(value))
    yield environment
    yield ""
    products = Table("product on", "in", "by", "arithmetic", show_edge=False)
    products.add_column("rate (FP32 = 1)", justify="right")
    for product in machine.products:
        arithmetic = {True: "native", False: "none", None: ""}[product.is_native]
        rate = "cannot run" if product.rate is None else f"{product.rate:.3g}"
        products.add_row(product.device, product.dtype, product.way, arithmetic, rate)
    yield products
    yield ""
    advice = machine.advice
    preset = (f"precision={advice.preset!r}", "bold")
    yield Text.assemble("Advice: ", preset, f". {advice.reason} Otherwise {advice.otherwise}")
