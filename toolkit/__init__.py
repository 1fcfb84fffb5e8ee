"""Functional training for transformer models on Hugging Face Accelerate.

    import toolkit as tk

Every public name is an attribute of this package. `__init__.pyi` lists them, each with the file it is in, which is loaded
when the name is first used, so that the import itself costs nothing.
"""

import os

import lazy_loader

from toolkit.system.imports import imported_to_stay

# How long OpenMP's threads wait for each other before they sleep; read once, when torch is loaded. With libgomp's 300,000 turns
# a step on two cores, of which one has other work, takes 110 times as long as on two idle ones, with these 6 times.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = imported_to_stay()(__getattr__)
