"""A name of torch that is not public, and that optimizers need, is where it was."""

from toolkit.optim.compat import devices_of_fused_kernels


def test_fused_kernels_are_there_for_the_devices_that_torch_names() -> None:
    """Fails when: torch moves the name."""
    assert {"cpu", "cuda"} <= set(devices_of_fused_kernels())
