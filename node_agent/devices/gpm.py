"""GPU performance monitoring (GPM) through NVML, from Hopper on: the share of SMs that worked between two samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from protocol.messages import GpuId

#: NVML_GPM_METRIC_SM_UTIL, in percent. A number, since some releases of pynvml hold tuples for such constants.
SM_UTIL = 2
#: Samples must lie more than 100 ms apart. Source: nvml.h, nvmlGpmMetricsGet.
GAP_MIN_S = 0.101


class Gpm:
    """The last sample of each GPU, and its activity from there to the next. Call it in NVML's thread.

    Parameters
    ----------
    nvml
        The module `pynvml`.
    clock
        Seconds, monotonic.
    """

    def __init__(self, nvml: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._supported: dict[GpuId, bool] = {}
        self._last: dict[GpuId, tuple[Any, Any, float]] = {}  #: handle, sample, when

    def supports(self, gpu: GpuId, handle: Any) -> bool:
        """Say whether the driver has GPM for this GPU."""
        if gpu not in self._supported:
            try:
                answer = self._nvml.nvmlGpmQueryDeviceSupport(handle)
                self._supported[gpu] = bool(answer.isSupportedDevice)
            except self._nvml.NVMLError:
                self._supported[gpu] = False
        return self._supported[gpu]

    def busy(self, gpu: GpuId, handle: Any) -> float | None:
        """Return the share of SMs that worked since the last call, 0 to 1; None at the first, or within 100 ms.

        A call that comes too early leaves the last sample as it is, so that the next covers both times.
        """
        now_s = self._clock()
        _, before, at_s = self._last.get(gpu, (None, None, -math.inf))
        if now_s - at_s < GAP_MIN_S:
            return None
        if before is not None and self._last[gpu][0] is not handle:
            before = None  # the library was opened afresh since
        sample = self._sample(gpu, handle)
        if sample is None:
            return None
        self._last[gpu] = (handle, sample, now_s)
        return None if before is None else self._between(before, sample)

    def _sample(self, gpu: GpuId, handle: Any) -> Any:
        """Take a sample; None, and no further attempt, where the driver refuses, as under MIG."""
        nvml = self._nvml
        sample = nvml.nvmlGpmSampleAlloc()
        try:
            nvml.nvmlGpmSampleGet(handle, sample)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            nvml.nvmlGpmSampleFree(sample)
            self._supported[gpu] = False
            return None
        except nvml.NVMLError:
            nvml.nvmlGpmSampleFree(sample)
            raise
        return sample

    def _between(self, before: Any, after: Any) -> float | None:
        nvml = self._nvml
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = 1
        asked.sample1, asked.sample2 = before, after
        asked.metrics[0].metricId = SM_UTIL
        try:
            nvml.nvmlGpmMetricsGet(asked)
        finally:
            nvml.nvmlGpmSampleFree(before)
        metric = asked.metrics[0]
        if metric.nvmlReturn != 0 or not math.isfinite(metric.value):
            return None
        return float(min(1.0, max(0.0, metric.value / 100.0)))
