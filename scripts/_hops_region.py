"""The paths of a weight, a gradient and the loss scale through one step, with the line of every hop."""

from __future__ import annotations

import ast

from _markdown import table
from _results import ROOT
from _speed_regions import PEER
from _stored import StoredResults

# (what happens, where: a file below hf_mp/ and the name of a function, method or class in it)
WEIGHT = (
    ("attach: an FP16/BF16 parameter becomes FP32 in place, and is the master", "weights/layout.py",
     "WeightLayout.prepare"),
    ("a forward begins", "step/forward.py", "AttachedForward.__call__"),
    ("what products do with its weights was learned in the first forward", "weights/product_uses.py",
     "ProductUses.slots"),
    ("each is rounded once an update", "weights/working_copies.py", "WorkingCopies.get"),
    ("and gets an inward border, small ones share one", "weights/slots.py", "Slots._bring_in"),
    ("the 16-bit copy lies in the slot of the parameter while the forward runs", "weights/slots.py", "Slots.fill"),
    ("a product takes it as it is", "casting/handlers.py", "lower_precision"),
    ("the step is guarded", "step/update.py", "StepGuard._step"),
    ("one kernel updates masters and copies, where there is one", "weights/fused_adamw.py", "step_whole"),
    ("else the optimizer writes the masters, and copies are rounded again", "weights/layout.py",
     "WeightLayout.updated"),
    ("detach: copies go, the masters stay", "step/mixed_precision.py", "MixedPrecision.detach"),
)  # fmt: skip
GRADIENT = (
    ("it comes in through an output, in FP32", "scaling/borders.py", "_OutputBorder.backward"),
    ("is multiplied by S and cast to the output's dtype", "scaling/borders.py", "multiply"),
    ("a backward began", "step/gradients.py", "GradientCheck.backward_began"),
    ("leaves the model by an inward border (a product on a CPU writes a weight's itself)", "scaling/borders.py",
     "_InwardBorders.backward"),
    ("which asks for 1/S", "step/mixed_precision.py", "MixedPrecision.inverse"),
    ("multiplies by it in FP32, and autograd adds the result to `.grad`", "scaling/borders.py", "_multiply_all"),
    ("the backward ended", "step/gradients.py", "GradientCheck._backward_ended"),
    ("the largest magnitude, and the norm, are measured in one pass", "step/gradients.py",
     "GradientCheck.measure"),
    ("the step asks for the verdict", "step/gradients.py", "GradientCheck.verdict"),
    ("the optimizer uses it, or the step is skipped", "step/update.py", "StepGuard._step"),
)  # fmt: skip
SCALE = (
    ("the policy names a rule", "policy.py", "PrecisionPolicy"),
    ("the scaler keeps its state", "scaling/scalers.py", "make_loss_scaler"),
    ("S and 1/S are tensors on each device", "scaling/scalers.py", "LossScaler.scale_tensors"),
    ("the output border asks for S", "step/mixed_precision.py", "MixedPrecision.scale"),
    ("the inward borders ask for 1/S", "step/mixed_precision.py", "MixedPrecision.inverse"),
    ("the step ends", "step/mixed_precision.py", "MixedPrecision.finish_step"),
    ("the scaler counts it", "scaling/scalers.py", "LossScaler.record_step"),
    ("the rule gives the next state, a pure function", "scaling/rules.py", "adjust_headroom"),
    ("it is saved", "scaling/scalers.py", "state_of"),
)


def hops(results: StoredResults) -> str:
    """The three paths as numbered lists."""
    paths = (("A weight", WEIGHT), ("A gradient", GRADIENT), ("The loss scale S", SCALE))
    return "\n\n".join(f"**{title}**\n\n" + "\n".join(_listed(path)) for title, path in paths)


def _listed(path: tuple[tuple[str, str, str], ...]) -> list[str]:
    return [
        f"{number}. {what}: [`{name}`](../hf_mp/{file}), `{file}:{line_of(file, name)}`"
        for number, (what, file, name) in enumerate(path, 1)
    ]


def line_of(file: str, name: str) -> int:
    """The line where ``name`` is defined in a file below ``hf_mp/``."""
    node: ast.AST = ast.parse((ROOT / "hf_mp" / file).read_text())
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        node = next(n for n in ast.iter_child_nodes(node) if isinstance(n, kinds) and n.name == part)
    return node.lineno  # type: ignore[attr-defined]


def host(results: StoredResults) -> str:
    """What a step costs the host: by a look at each call, by slots, by slots with shared borders, and now."""
    kinds = {
        "bench_host_before": "a look at each call's arguments",
        "bench_host_single_borders": "slots, a border for each weight",
        "bench_host_slots": "slots, small weights in groups of 16",
        "bench_host": "now",
    }
    ours = ("hf_mp bf16", "hf_mp fp16", "hf_mp fp16-lean")

    def ratio(name: str, who: str) -> float:
        found = results(name)["contenders"]
        ours, theirs = (found[contender]["step"]["median_seconds"].number for contender in (who, PEER))
        return float(ours / theirs)

    def machine(name: str) -> str:
        device = results(name).root["device"]
        return f"{device['CPU'].text}, FP16 products {device['FP16 products on the CPU'].text}"

    rows = [[label, *(f"{ratio(name, who):.2f}" for who in ours), machine(name)] for name, label in kinds.items()]
    return table(("way to the parameters", *(f"`{who.removeprefix('hf_mp ')}`" for who in ours), "CPU"), rows)
