"""CUDA graphs replay on addresses, which parking moves: it must refuse while one is alive, and only then.

The driver's checkpoint keeps addresses, so it takes over from a parking that refuses.
"""

from __future__ import annotations

import gc
from typing import Any

from app_agent.training import parking
from benchmarks.gpu.readings import Readings
from benchmarks.gpu.record import Section, Setting, missing
from benchmarks.gpu.sections import SECTIONS, driver
from benchmarks.gpu.trainees import Answer, Trainee, trainee

WIDTH = 1024
MOVED = "a process with a CUDA graph"


def run(setting: Setting, section: Section) -> None:
    """Ask for parking beside graphs of PyTorch's own and of its compiler."""
    with trainee(setting.device, "graph") as one:
        found = one.ask(captured)
        section.note(captured=found)
        section.check("parking refuses while a CUDA graph is alive", bool(found["refused"]), **found)
        section.check("a refused parking leaves the graph right", found["same"], **found)
        take_over(setting, section, one)
        freed = one.ask(released)
        section.note(released=freed)
        # A workspace of cuBLAS may outlive the graph in its pool; then parking goes on refusing, which is safe.
        section.check("parking is exact once the graph is gone, or refused", freed["same"], **freed)
    with trainee(setting.device, "compiled") as one:
        compiled = one.ask(compile_model)
        section.note(compiled=compiled)
        if compiled["absent"]:
            return
        section.check("parking refuses a model compiled to CUDA graphs", bool(compiled["refused"]), **compiled)
        section.check("a refused parking leaves the compiled model right", compiled["same"], **compiled)


def take_over(setting: Setting, section: Section, one: Trainee) -> None:
    """Have the driver suspend and resume a process that holds a graph, and replay it."""
    helper = driver.helper_of(setting)
    if absent := missing(SECTIONS["driver"].needs):
        why = f"not installed: {', '.join(absent)}"
    else:
        why = driver.ask(helper, {"do": "probe", "timeout_s": driver.PROBE_S})["reason"]
    if why:
        section.untried(f"the driver suspends and resumes {MOVED}", why)
        return
    found = driver.turn(helper, one, Readings.of(one))
    section.note(driver=found)
    if driver.held(section, MOVED, found):
        section.check("a graph that the driver has moved replays the same", one.ask(replayed)["same"])


# --- in the trainee -------------------------------------------------------------------------------------------------


def captured(child: Any) -> Answer:
    """Capture a graph, ask for parking, and replay."""
    import torch

    model = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
    given = torch.randn(8, WIDTH, device="cuda")
    with torch.no_grad():
        _warm_up(model, given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = model(given)
        graph.replay()
        before = made.cpu()
        refused = refusal()
        made.zero_()
        graph.replay()
    child.graph = (graph, model, given, made)
    return {"refused": refused, "same": torch.equal(made.cpu(), before)}


def replayed(child: Any) -> Answer:
    """Replay the graph onto a result that was wiped."""
    import torch

    graph, _, _, made = child.graph
    before = made.cpu().clone()
    made.zero_()
    graph.replay()
    return {"same": torch.equal(made.cpu(), before)}


def released(child: Any) -> Answer:
    """Let the graph go, park for real, and compute the same without it."""
    import torch

    model, given = child.graph[1:3]
    before = child.graph[3].cpu()
    child.graph = None
    gc.collect()
    torch.cuda.synchronize()
    refused = refusal()
    with torch.no_grad():
        return {"refused": refused, "same": torch.allclose(model(given).cpu(), before)}


def compile_model(_child: Any) -> Answer:
    """Train a model that the compiler runs by CUDA graphs; `absent` says why there is none."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()).cuda()
    given = torch.randn(8, WIDTH, device="cuda")
    try:
        fast = torch.compile(model, mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            fast(given).sum().backward()
            model.zero_grad(set_to_none=True)
    except Exception as error:  # noqa: BLE001 - no compiler here: said, and not judged
        return {"absent": f"{type(error).__name__}: {error}"[:300]}
    torch.compiler.cudagraph_mark_step_begin()
    before = fast(given).detach().cpu()
    refused = refusal()
    torch.compiler.cudagraph_mark_step_begin()
    return {"absent": "", "refused": refused, "same": torch.equal(fast(given).detach().cpu(), before)}


def refusal() -> str:
    """Ask for parking; return why it was refused, or park, restore and return nothing."""
    try:
        parking.park().restore()
    except parking.ParkRefused as refused:
        return str(refused)
    return ""


def _warm_up(model: Any, given: Any) -> None:
    """Run on a side stream first, as PyTorch asks of whoever captures."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(given)
    torch.cuda.current_stream().wait_stream(stream)
