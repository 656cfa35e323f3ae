"""How long a test waits for what must happen.

No test measures time by it: it only ends a test that would wait for ever. So it is far longer than anything takes on a
busy machine, where the first import of PyTorch alone may take half a minute.
"""

from __future__ import annotations

PATIENCE_S = 120.0
