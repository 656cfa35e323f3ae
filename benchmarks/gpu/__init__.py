"""The mechanisms on a real GPU: suspend, resume, share and look in, measured and held to what they promise.

``python -m benchmarks.gpu [--part 1] [--only park,driver] [--gb 4] [--out DIR]``
``python -m benchmarks.gpu --rehearse [played] ...``

Ten sections in five parts of at most eight minutes. Figures and checks go into ``DIR/gpu.json`` as they are found,
each section with its date, GPU, driver and command; from them each goal is judged (`benchmarks.gpu.goals`). A section
that has ended is not run again (`--again` does), so a run that was cut short goes on with the same line. Each section
runs in a process of its own and has a limit: one that crashes or takes too long is ended, and keeps what it had found.
The exit code is 1 if a check failed or a section broke. Without a GPU nothing is measured: the document says so, and
the exit code is 0.

No setting of a GPU is changed and none is reset. CUDA runs in processes of their own, so that this one holds no
context, which would be a stranger on the GPU that the demonstration shares.

Needed are PyTorch and the module of the library; what else a section needs, and whether it is there, is said when it
is left out. Therefore values here are plain dataclasses. `--rehearse` runs on the CPU what can be, small, and writes
``rehearsal.json``: that the suite works, not the mechanisms; its figures say nothing. GPUs are simulated then, or with
`played` those of NVIDIA's libraries as tests/support/stand_in plays them.
"""
