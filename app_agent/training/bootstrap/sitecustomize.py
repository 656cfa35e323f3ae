"""Found first on the path of every Python program under a lease: makes an unchanged training script cooperative.

The node agent puts this folder at the head of PYTHONPATH. The first Python process of the task finds the node agent's
socket in its environment, loads the library from the package around this folder (the interpreter need not have it
installed) and starts its helper thread. All others only pay for looking. PyTorch is not imported from here. A launcher
such as torchrun leaves the socket to the training processes that it starts.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would cost each program its import


def _load_library() -> None:
    """Make `app_agent` the package two folders up, without putting its parent on the path."""
    folder = os.path.dirname(os.path.dirname(_HERE))  # noqa: PTH120 - as above
    start = os.path.join(folder, "__init__.py")  # noqa: PTH118 - as above
    spec = importlib.util.spec_from_file_location("app_agent", start, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["app_agent"] = package
    spec.loader.exec_module(package)


def _start_session() -> None:
    if "GPU_ARBITER_SOCKET" in os.environ:
        _load_library()
        from app_agent import session

        session._begin()


def _run_the_other() -> None:
    """Run the sitecustomize that this one hides, if the environment has one."""
    path = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]  # noqa: PTH100 - as above
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _run_the_other()
finally:
    _start_session()
