"""Settings: what they are, which there are, and every rule about their values.

`setting` defines a setting; `groups`, `tasks`, `preferences`, `adapter`, `policy` and others list them; `values` reads and
checks one value from text, YAML or JSON; `rules` puts the tables of what does not go together to a config; `files` reads and
writes config.yaml. Nothing here imports a heavy library. `__init__.pyi` lists the public names, each with its file, which is
loaded when the name is first used, so that a command without settings makes no class of them.
"""

import lazy_loader

from toolkit.config.setting import setting as setting  # a file has the same name, which would take its place

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
