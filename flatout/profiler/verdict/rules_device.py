"""Findings about the way between host and GPU: copies that block, reads that wait, kernels too small to be worth it."""

from collections.abc import Iterator

from flatout.profiler.verdict.numbers import Numbers
from flatout.profiler.verdict.predict_step import WhatIf, remedy
from flatout.profiler.verdict.remedy import Finding
from flatout.profiler.verdict.rules_host import LOOPED_READS

IDLE_WORTH_A_LOOK = 0.05

CUDA_GRAPH = "replay the step as one CUDA graph"
"""The remedy's name. No flag of ours does this and nothing else, so none is named as its switch."""


def device_findings(n: Numbers) -> Iterator[Finding]:
    """Nothing where there is no device."""
    if not n.m.has_device:
        return
    yield from _blocking_copy(n)
    yield from _waits(n)
    yield from _launches(n)


def _blocking_copy(n: Numbers) -> Iterator[Finding]:
    copy_ms = n.kind_ms("copy")
    if copy_ms < 0.03 * n.step_ms:
        return
    yield Finding(
        cause="blocking copy",
        sentence=f"The main thread stands still while batches are copied to the GPU: {n.percent(copy_ms)} of the step.",
        evidence=[f"copy {copy_ms:.1f} ms per step, from memory that is not page-locked or with non_blocking=False"],
        remedies=[
            remedy(
                n,
                what="copy from pinned memory, beside the step",
                change="DataLoader(pin_memory=True) and batch.to(device, non_blocking=True)",
                step_ms=WhatIf(n).with_consumer(0.9 * copy_ms),
                uncertainty=0.1,
            )
        ],
        cost_ms=0.9 * copy_ms,
    )


def _waits(n: Numbers) -> Iterator[Finding]:
    """A few waits per step: the host cannot run ahead, so the GPU idles while the next kernels are launched."""
    busy_ms, sites = n.m.device_busy_ms, [site for site in n.m.waits if 0.5 <= site.per_step < LOOPED_READS]
    if busy_ms is None or not sites or n.device_idle_ms < IDLE_WORTH_A_LOOK * n.step_ms:
        return
    # Without waits host and device work side by side: the slower one sets the step.
    launching_ms = (n.m.launches or 0.0) * (n.m.launch_us or 5.0) / 1e3
    then_ms = max(n.between_ms + max(busy_ms, launching_ms), n.consumer_ms - n.device_idle_ms)
    num = sum(site.per_step for site in sites)
    yield Finding(
        cause="logging sync" if all(_logs(site.text) for site in sites) else "host-device waits",
        sentence=(
            f"The host waits for the GPU in every step ({num:.1f} times), "
            f"so the GPU idles {n.percent(n.device_idle_ms)} of the step until new work is launched."
        ),
        evidence=[f"{site.per_step:.0f} per step at {site.where}  {site.text}".rstrip() for site in sites[:5]]
        + [f"GPU busy {busy_ms:.1f} of {n.step_ms - n.between_ms:.1f} ms per step"],
        remedies=[
            remedy(
                n,
                what="read numbers once per log interval",
                change=f"{sites[0].where}: keep the tensor (loss.detach()) and read it every 50 steps",
                step_ms=max(then_ms, WhatIf(n).with_consumer(n.device_idle_ms)),
                uncertainty=0.12,
            )
        ],
        cost_ms=n.device_idle_ms,
    )


def _launches(n: Numbers) -> Iterator[Finding]:
    """Kernels so small that launching them takes longer than running them."""
    busy_ms, launches = n.m.device_busy_ms, n.m.launches
    if busy_ms is None or not launches or n.num_waits >= LOOPED_READS:
        return
    queueing_ms = _queueing_ms(n)
    if queueing_ms < 1.1 * busy_ms or n.device_idle_ms < 0.1 * n.step_ms or n.wait_ms > 0.3 * n.step_ms:
        return
    yield Finding(
        cause="kernel launches",
        sentence=(
            f"Launching {launches:,.0f} kernels takes the host longer than the GPU needs to run them: "
            f"it idles {n.percent(n.device_idle_ms)} of the step."
        ),
        evidence=[
            f"{launches:,.0f} launches keep the main thread {queueing_ms:.1f} ms, while the GPU works {busy_ms:.1f} ms",
            f"{n.images:.0f} images per step",
        ],
        remedies=[
            remedy(
                n,
                what=CUDA_GRAPH,
                change="torch.cuda.graph or torch.compile(mode='reduce-overhead'); flatout: --fast (graphs and more)",
                step_ms=WhatIf(n).with_consumer(queueing_ms, device_ms=1.05 * busy_ms),
                uncertainty=0.15,
            ),
        ],
        cost_ms=n.device_idle_ms,
    )


def _queueing_ms(n: Numbers) -> float:
    """What launching takes of the main thread.

    In a thread that waits for the device, stages hold those waits; then only what launches cost at least is known.
    """
    if n.num_waits >= 0.5:
        return (n.m.launches or 0.0) * (n.m.launch_us or 5.0) / 1e3
    return sum(map(n.kind_ms, ("compute", "loss", "update")))


def _logs(text: str) -> bool:
    return any(word in text for word in ("loss", "log", "print", "writer", "meter", "total", "running"))
