"""The mechanisms on a real GPU: suspend, resume, share and look in, measured and held to what they promise.

``python -m benchmarks.gpu [--out DIR] [--only park,driver] [--gb 4] [--rehearse]``

Eight sections, each by itself; together they take some ten minutes. All figures and checks go into ``DIR/gpu.json``,
which is written anew after each section. The exit code is 1 if a check failed that ran. Without a GPU nothing is
measured: the document says so, and the exit code is 0.

No setting of a GPU is changed and none is reset. CUDA runs in processes of their own, so that this one holds no
context, which would be a stranger on the GPU that the demonstration shares.

Needed are PyTorch and the module of the library; what else a section needs, and whether it is there, is said when it
is left out. Therefore values here are plain dataclasses. `--rehearse` runs on the CPU what can be, small: that the
suite works, not the mechanisms; its figures say nothing.
"""
