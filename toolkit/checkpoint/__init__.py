"""Checkpoints: a run's state as a value, and directories that hold a complete one or none.

`__init__.pyi` lists the names, each with the file that is loaded when it is first used: what only looks at directories does
without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
