"""A name of torch that is not public; tests/optim/test_compat.py fails when it moves. Seen in torch 2.13."""


def devices_of_fused_kernels() -> list[str]:
    """The types of devices on which torch's optimizers update all parameters in one kernel."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return _get_fused_kernels_supported_devices()
