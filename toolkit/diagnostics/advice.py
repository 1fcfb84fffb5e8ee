"""What to change first in a run that is slow, from where its time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from toolkit.diagnostics.profile import Profile
from toolkit.diagnostics.saving import Saving
from toolkit.distributed.engines.engine import Exchanged
from toolkit.system.compat import multiplies_bf16


def first_change(profile: Profile, settings: Mapping[str, Any]) -> str:
    """One sentence: the part of a step, or of the run, that costs most of what could be saved, and the flag for it."""
    half = settings.get("bf16") is False and not settings.get("fp16")
    workers = f"--dataloader-num-workers {max(2, 2 * (settings.get('dataloader_num_workers') or 0))}"
    waiting = profile.share("communication") * profile.waiting
    transfer = profile.share("communication") - waiting
    of_loop = (profile.share(phase) for phase in ("data", "sampling", "scoring", "other"))
    rivals = waiting, transfer, profile.padding, *of_loop
    if (saving := profile.saving) and saving.saves > 1 and saving.share > max(0.1, *rivals):
        return f"{saving.share:.0%} of the run is saving: {_save_less(saving, profile.step, settings)}"
    if waiting > 0.1:
        late = _late_rank(profile, settings, workers)
        return f"{waiting:.0%} of a step the ranks wait for the slowest of them: {late}"
    if transfer > 0.2:
        return f"{transfer:.0%} of a step is communication that no computation hides: {_LESS_TRANSFER[profile.exchanged]}"
    if profile.share("data") > 0.1:
        return f"{profile.share('data'):.0%} of a step waits for data: take {workers}."
    if profile.padding > 0.2:
        ways = [way for way in (_even_rows(settings), "a smaller --max-length") if way]
        return f"{profile.padding:.0%} of the positions are padding: take {', or '.join(ways)}."
    if half and multiplies_bf16(profile.device):
        return f"This {'GPU' if profile.device == 'cuda' else 'CPU'} multiplies bfloat16 faster than float32: take --bf16."
    if profile.share("scoring") > 0.15:
        processes = f"--reward-processes {2 * max(1, settings.get('reward_processes') or 0)}"
        return f"{profile.share('scoring'):.0%} of a step is rewards: look at what they compute, or take {processes}."
    if profile.share("sampling") > 0.3:
        return f"{profile.share('sampling'):.0%} of a step is sampling: {_sample_less(profile, settings)}"
    if profile.share("optimizer") + profile.share("clipping") > 0.3:
        share = profile.share("optimizer") + profile.share("clipping")
        return f"{share:.0%} of a step is the update: take larger batches (--global-batch-size), so that there are fewer."
    if settings.get("gradient_checkpointing"):
        return "Activations are computed twice: leave out --gradient-checkpointing if they fit, which toolkit plan says."
    idle = 1 - (profile.busy + profile.seconds.get("communication", 0.0)) / profile.step if profile.busy is not None else 0.0
    if profile.device == "cuda" and settings.get("torch_compile") is False:
        if idle > 0.2:
            first = "take the largest micro-batch (toolkit plan --largest), and try --torch-compile with it"
            return f"The GPU has nothing to compute for {idle:.0%} of a step: {first}."
        return "The model is most of a step: try --torch-compile, and the largest micro-batch (toolkit plan --largest)."
    if idle > 0.2:
        more = "take larger and fewer micro-batches, and read no value of a tensor in the loop."
        return f"The GPU has nothing to compute for {idle:.0%} of a step: {more}"
    if profile.share("other") > 0.15:
        return f"{profile.share('other'):.0%} of a step is outside of the model: look at what your loop does in each step."
    return "Forward and backward are most of a step, as they should be: there is no single bottleneck."


_LESS_TRANSFER: dict[Exchanged, str] = {
    "nothing": "take more micro-batches a step (--gradient-accumulation-steps), after which alone gradients are exchanged.",
    "gradients": "take larger micro-batches and fewer of them (--per-device-train-batch-size, --gradient-accumulation-steps).",
    "weights": "every micro-batch gathers the weights: take larger and fewer ones, or --zero-stage 2 where it fits.",
}  # fmt: skip


def _even_rows(settings: Mapping[str, Any]) -> str:
    """The flag with which less is padded and micro-batches are more alike; "" where it is set."""
    for name in ("row_layout", "pair_layout"):
        if settings.get(name) == "padded":
            return f"--{name.replace('_', '-')} packed"
    if settings.get("group_by_length"):
        return ""
    may_pack = settings.get("packing") is False
    return "--packing, or --group-by-length where rows can't be packed" if may_pack else "--group-by-length"


def _sample_less(profile: Profile, settings: Mapping[str, Any]) -> str:
    if "on_policy_share" in settings:
        return "take a shorter --max-new-tokens, or a smaller --on-policy-share."
    shorter = "take a shorter --max-completion-length"
    if settings.get("rollout_server"):
        return f"{shorter}, or give the server more devices."
    return f"{shorter}{', or let a server sample (--rollout-server)' if profile.device == 'cuda' else ''}."


def _save_less(saving: Saving, step_seconds: float, settings: Mapping[str, Any]) -> str:
    """So that saving is a twentieth of the run."""
    apart = math.ceil(19 * saving.seconds / step_seconds)
    digits = 10 ** max(0, len(str(apart)) - 2)
    steps = min(-(-apart // digits) * digits, saving.steps)
    often = f"take --save-steps {steps}, which makes it {saving.seconds / (saving.seconds + steps * step_seconds):.0%}"
    return f"{often}{'' if settings.get('async_save') is not False else ', or --async-save'}."


def _late_rank(profile: Profile, settings: Mapping[str, Any], workers: str) -> str:
    rank, phase, behind = profile.late()
    alike = _even_rows(settings)
    if behind < 0.5 * profile.waiting * profile.seconds["communication"]:
        how = f"take {alike}" if alike else "look for other programs on their devices"
        return f"now one, now another, as their rows differ in length or their devices are shared: {how}."
    where = f"rank {rank}, which is behind in {phase}"
    if phase == "data":
        return f"{where}: take {workers}, and look at its disk."
    if phase == "other":
        return f"{where}: look at what your loop does on that rank."
    return f"{where}: compare its device with the others', and what else runs on it{f', or take {alike}' if alike else ''}."
