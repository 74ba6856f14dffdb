"""What only a CUDA device can show: `python -m pytest -m gpu`, some minutes; skipped where there is none.

Its host waits are counted without one in tests/rpt/host_waits.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rpt import ResidualPolarTransport
from rpt.ownership import Ownership
from rpt.rule.polar import working_dtype

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
SHAPES = ((96, 80), (96, 80), (80, 96), (300, 260), (12, 5), (7, 3, 3, 3), (40,), (5,), ())
# Steps before a recording, as a CUDA graph is warmed up.
YOUNG = 10


def parameters(device=DEVICE):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in SHAPES]


def feed(params, step):
    """Gradients in the same memory in every step."""
    generator = torch.Generator().manual_seed(step)
    for p in params:
        gradient = torch.randn(p.shape, generator=generator).to(p.device) + 0.3 * p.detach()
        if p.grad is None:
            p.grad = gradient
        else:
            p.grad.copy_(gradient)


def trained(device=DEVICE, steps=20, **options):
    params = parameters(device)
    optimizer = ResidualPolarTransport(params, 1e-2, **options)
    for step in range(steps):
        feed(params, step)
        optimizer.step()
    return [p.detach().cpu() for p in params]


def differences(found, wanted):
    """‖found - wanted‖ over the way that `wanted` has gone, for each parameter."""
    start = [p.detach() for p in parameters("cpu")]
    return [
        float((f - w).norm() / (w - s).norm()) for f, w, s in zip(found, wanted, start, strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    # Roots by products are damped a little differently; the published rule decomposes on both.
    [({}, 0.03), ({"roots": "none"}, 1e-3), ({"preset": "paper"}, 0.02)],
    ids=["default", "no metric", "paper"],
)
def test_twenty_steps_agree_with_the_cpu(options, tolerance):
    options = {"polar_dtype": "float32"} | options
    assert max(differences(trained(**options), trained("cpu", **options))) < tolerance


def test_the_polar_factor_is_computed_in_bfloat16_and_stays_near_float32():
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("no bfloat16 units")
    assert working_dtype("auto", torch.zeros(1, device=DEVICE)) == torch.bfloat16
    assert (
        working_dtype("auto", torch.zeros(1, device=DEVICE, dtype=torch.float64)) == torch.float64
    )
    found, exact = trained(), trained(polar_dtype="float32")
    assert 0 < max(differences(found, exact)) < 0.05


def test_an_ordinary_step_waits_nowhere_but_where_it_says(monkeypatch):
    """CUDA itself refuses every other wait, also in steps that make roots."""
    agree = Ownership.agree

    def excused(*arguments):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return agree(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    params = parameters()
    optimizer = ResidualPolarTransport(params, torch.tensor(1e-2, device=DEVICE))
    for step in range(8):
        feed(params, step)
        if step < 2:
            optimizer.step()  # makes stacks and constants
            continue
        monkeypatch.setattr(Ownership, "agree", excused)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in params)


def test_a_cuda_graph_replays_the_step():
    twins = []
    for recorded in (False, True):
        params = parameters()
        rate = torch.tensor(1e-2, device=DEVICE)
        optimizer = ResidualPolarTransport(params, rate, capturable=True)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        for step in range(YOUNG + 30):
            feed(params, step)
            if not recorded:
                optimizer.step()
            elif step <= YOUNG:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    optimizer.step()
                torch.cuda.current_stream().wait_stream(side)
            else:
                if step == YOUNG + 1:
                    with torch.cuda.graph(graph):
                        optimizer.step()
                graph.replay()
        twins.append([p.detach().cpu() for p in params])
    # Recorded steps renew their roots in turn, ordinary ones by age.
    assert max(differences(twins[1], twins[0])) < 0.05


def test_state_takes_the_bytes_that_it_takes_on_a_cpu_and_nothing_is_left_behind():
    def state_bytes(optimizer):
        return sum(
            v.numel() * v.element_size()
            for record in optimizer.state.values()
            for v in record.values()
            if isinstance(v, torch.Tensor)
        )

    sizes = []
    for device in ("cpu", DEVICE):
        params = [nn.Parameter(torch.randn(512, 512, device=device)) for _ in range(4)]
        optimizer = ResidualPolarTransport(params)
        for step in range(6):
            feed(params, step)
            if step == 1 and device == DEVICE:
                held = torch.cuda.memory_allocated()
            optimizer.step()
        sizes.append(state_bytes(optimizer))
    assert sizes[0] == sizes[1]
    weights = sum(p.numel() * p.element_size() for p in params)
    assert torch.cuda.memory_allocated() - held < 0.25 * weights


def test_a_compiled_model_and_a_compiled_step_train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).to(DEVICE)
    x = torch.randn(128, 32, device=DEVICE)
    y = torch.sin(x[:, :4])
    optimizer = ResidualPolarTransport(model.parameters(), 3e-3)
    forward, step = torch.compile(model), torch.compile(optimizer.step)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(x), y)
        loss.backward()
        step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
