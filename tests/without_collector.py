"""The first thing that the process from which runs are forked imports: none of what it imports then is garbage (`built_before.py`)."""

import gc

gc.disable()
