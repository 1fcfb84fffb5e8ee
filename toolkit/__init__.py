"""Functional training for transformer models on Hugging Face Accelerate.

    import toolkit as tk

Every public name is an attribute of this package. `__init__.pyi` lists them, each with the file it is in, which is loaded
when the name is first used, so that the import itself costs nothing.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
