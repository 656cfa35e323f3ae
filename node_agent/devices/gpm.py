"""GPU performance monitoring (GPM) through NVML, from Hopper on: shares of a GPU in use between two samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from protocol.messages import GpuId

#: NVML_GPM_METRIC_SM_UTIL, ..._SM_OCCUPANCY and ..._DRAM_BW_UTIL, in percent: the SMs that had work, the warps that
#: they held of those they could hold, the bandwidth. Numbers, since some releases of pynvml hold tuples for constants.
SM_UTIL, SM_OCCUPANCY, DRAM_BANDWIDTH = 2, 3, 10
#: Samples must lie more than 100 ms apart. Source: nvml.h, nvmlGpmMetricsGet.
GAP_MIN_S = 0.101
#: A GPU whose monitors erred is asked again after so long; meanwhile its utilisation stands in.
AGAIN_S = 30.0


class Gpm:
    """The last sample of each GPU, and the metrics from there to the next. Call it in NVML's thread.

    Parameters
    ----------
    nvml
        The module `pynvml`.
    metrics
        The numbers of the metrics, each of which is a percentage.
    clock
        Seconds, monotonic.
    """

    def __init__(self, nvml: Any, metrics: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._errors = (nvml.NVMLError, nvml.NVMLLibraryMismatchError)
        self._metrics = tuple(metrics)
        self._clock = clock
        self._supported: dict[GpuId, bool] = {}
        self._again_s: dict[GpuId, float] = {}  #: those that erred: when to ask again
        self._last: dict[GpuId, tuple[Any, Any, float]] = {}  #: handle, sample, when

    def supports(self, gpu: GpuId, handle: Any) -> bool:
        """Say whether the driver has GPM for this GPU, as far as it can be asked now."""
        nvml = self._nvml
        if self._clock() < self._again_s.get(gpu, -math.inf):
            return False
        if gpu not in self._supported:
            try:
                self._supported[gpu] = bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
                self._supported[gpu] = False
            except self._errors:
                self._again_s[gpu] = self._clock() + AGAIN_S
                return False
        return self._supported[gpu]

    def read(self, gpu: GpuId, handle: Any) -> tuple[float, ...] | None:
        """Return each metric since the last call, 0 to 1; None at the first, or within 100 ms.

        A call that comes too early leaves the last sample as it is, so that the next covers both times.
        """
        now_s = self._clock()
        _, before, at_s = self._last.get(gpu, (None, None, -math.inf))
        if now_s - at_s < GAP_MIN_S:
            return None
        if before is not None and self._last[gpu][0] is not handle:
            self._drop(gpu)  # the library was opened afresh since
            before = None
        try:
            sample = self._sample(handle)
            self._last[gpu] = (handle, sample, now_s)
            return None if before is None else self._between(before, sample)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            self._supported[gpu] = False  # as under MIG
            self._drop(gpu)
        except self._errors:
            self._again_s[gpu] = now_s + AGAIN_S
        return None

    def _drop(self, gpu: GpuId) -> None:
        _, sample, _ = self._last.pop(gpu, (None, None, 0.0))
        if sample is not None:
            self._nvml.nvmlGpmSampleFree(sample)

    def _sample(self, handle: Any) -> Any:
        nvml = self._nvml
        sample = nvml.nvmlGpmSampleAlloc()
        try:
            nvml.nvmlGpmSampleGet(handle, sample)
        except self._errors:
            nvml.nvmlGpmSampleFree(sample)
            raise
        return sample

    def _between(self, before: Any, after: Any) -> tuple[float, ...] | None:
        nvml = self._nvml
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(self._metrics)
        asked.sample1, asked.sample2 = before, after
        for place, metric in enumerate(self._metrics):
            asked.metrics[place].metricId = metric
        try:
            nvml.nvmlGpmMetricsGet(asked)
        finally:
            nvml.nvmlGpmSampleFree(before)
        found = [asked.metrics[place] for place in range(len(self._metrics))]
        if any(metric.nvmlReturn != 0 or not math.isfinite(metric.value) for metric in found):
            return None
        return tuple(float(min(1.0, max(0.0, metric.value / 100.0))) for metric in found)
