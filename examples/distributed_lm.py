"""Train the demonstration's language model on several processes, under DDP or FSDP2.

    python examples/distributed_lm.py --quick
    torchrun --standalone --nproc-per-node 2 examples/distributed_lm.py --strategy ddp
    torchrun --standalone --nproc-per-node 2 examples/distributed_lm.py --strategy fsdp --save runs/lm

Without torchrun it is one process. Runs on CPUs (gloo) and GPUs (NCCL) alike.

Every rank prints what it owned, its state in memory, the bytes it sent per step, how long its
optimizer steps took and its highest memory. With `--save` the run writes a sharded checkpoint at its
end; with `--resume` it starts from one, on any number of processes.
"""

import argparse
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quick import announce
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rpt
from rpt.demo.model import LanguageModel
from rpt.demo.text import VOCABULARY_SIZE, load_corpus
from rpt.distributed import report


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--ownership", default="auto", help="auto, owner or replicated")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="over all ranks together")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--quick", action="store_true", help="three steps; figures mean nothing")
    parser.add_argument("--save", help="folder of the checkpoint to write")
    parser.add_argument("--resume", help="folder of the checkpoint to start from")
    options = parser.parse_args()
    if options.quick:
        options.steps = 3
    return options


def join(backend: str) -> None:
    """Join the processes that torchrun started; alone, a group of this one."""
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def wrap(model: LanguageModel, strategy: str, device: torch.device) -> nn.Module:
    """The model as several processes hold it: whole everywhere (DDP) or in shards (FSDP2)."""
    if strategy == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def peak_memory(device: torch.device) -> str:
    """The most memory this rank has held: of the device's own, or of the whole process on a CPU."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB of tensors"
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"{most / 2**20:.0f} MiB of process"


def main() -> None:
    options = arguments()
    on_gpu = torch.cuda.is_available()
    join("nccl" if on_gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    announce(options.quick and rank == 0)
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if on_gpu
        else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY_SIZE, options.context, options.width, options.layers).to(
        device
    )
    net = wrap(model, options.strategy, device)
    # Nothing here says "distributed": the optimizer sees what its parameters are.
    optimizer = rpt.ResidualPolarTransport(
        net.named_parameters(), lr=options.lr, ownership=options.ownership
    )
    optimizer.attach_model(net)
    if options.resume:
        model_state, optimizer_state = get_state_dict(net, optimizer)
        content = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(content, checkpoint_id=options.resume)
        set_state_dict(
            net,
            optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )
    text = load_corpus().train
    generator = torch.Generator().manual_seed(
        1
    )  # the same batches on every rank, then its own share
    step_seconds = step_work = 0.0
    started, worked = time.perf_counter(), time.process_time()
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.context, (options.batch,), generator=generator)
        windows = text[starts.chunk(size)[rank][:, None] + torch.arange(options.context + 1)]
        codes = windows.long().to(device)
        loss = nn.functional.cross_entropy(net(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())
        loss.backward()
        began, work_began = time.perf_counter(), time.process_time()
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        step_seconds += time.perf_counter() - began
        step_work += time.process_time() - work_began
        optimizer.zero_grad()
        if step % 10 == 9 or step == options.steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1:4d}  training loss {float(mean) / size:.4f}", flush=True)
    # Milliseconds per step, by the clock and of this process's own work: the rest is waiting.
    wall, work, step_wall, step_own = (
        1e3 * total / options.steps
        for total in (
            time.perf_counter() - started,
            time.process_time() - worked,
            step_seconds,
            step_work,
        )
    )
    mine = report(optimizer)
    line = (
        f"rank {rank}: {wall:.0f} ms per step ({work:.0f} of CPU), of which the optimizer "
        f"{step_wall:.0f} ({step_own:.0f}); owns {mine['parameters']} parameters, "
        f"{mine['state_bytes'] / 2**20:.2f} MiB of state; sends {mine['wire_bytes'] / 2**20:.2f} MiB; "
        f"peak {peak_memory(device)}"
    )
    lines = [None] * size
    dist.all_gather_object(lines, line)
    if rank == 0:
        print("\n".join(str(entry) for entry in lines), flush=True)
    if options.save:
        model_state, optimizer_state = get_state_dict(net, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
