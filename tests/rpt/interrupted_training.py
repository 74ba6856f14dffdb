"""Trains a tiny model in child processes and kills them with SIGKILL until it has been done often enough.

`python interrupted_training.py FOLDER KILLS SEED` prints one line of JSON. A third of the kills fall
inside the writing of a checkpoint. Every run that reaches its end is compared, bit for bit, with a run
that nothing interrupted.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from rpt import ResidualPolarTransport
from rpt.demo.race import write_atomically

STEPS, SAVE_EVERY = 60, 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 11, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, codes):
        return self.second(torch.tanh(self.first(self.norm(self.embedding(codes)))))


def train(folder, report=lambda step: None):
    """Continue from the folder's checkpoint, or start; leave the final weights in `final.pt`."""
    torch.manual_seed(0)
    model = Model()
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2, max_root_staleness=5)
    optimizer.attach_model(model, observe_every=4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    batches = torch.Generator().manual_seed(1)
    path, start = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        batches.set_state(saved["batches"])
        start = saved["step"]
    for step in range(start, STEPS):
        codes = torch.randint(11, (16,), generator=batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(codes), (3 * codes + 1) % 11).backward()
        optimizer.step()
        schedule.step()
        report(step)
        if (step + 1) % SAVE_EVERY == 0:
            payload = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "batches": batches.get_state(),
                "step": step + 1,
            }
            write_atomically(path, payload)
    write_atomically(folder / "final.pt", {"model": model.state_dict()})


def kill_in_write(moment, count):
    """Make this process kill itself at one moment of its count-th checkpoint write."""
    seen = [0]

    def arm(module, name, before):
        original = getattr(module, name)

        def wrapped(*args, **kwargs):
            seen[0] += 1
            if seen[0] == count:
                if before == "half":
                    os.write(args[1].fileno(), b"half of a checkpoint")
                elif not before:
                    original(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, wrapped)

    where = {
        "half written": (torch, "save", "half"),
        "before fsync": (os, "fsync", True),
        "before replace": (os, "replace", True),
        "after replace": (os, "replace", False),
    }
    arm(*where[moment])


MOMENTS = ("half written", "before fsync", "before replace", "after replace")


def child(folder, moment=None, count=1):
    process = os.fork()
    if process:
        return process
    try:
        if moment:
            kill_in_write(moment, count)
        train(folder)
        os._exit(0)
    except BaseException as error:  # the parent reads the code, a person the text
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def main(folder, kills, seed):
    torch.set_num_threads(1)
    draw = random.Random(seed)
    whole = folder / "whole"
    whole.mkdir(parents=True)
    started = time.monotonic()
    assert os.waitpid(child(whole), 0)[1] == 0
    duration = time.monotonic() - started
    reference = torch.load(whole / "final.pt")["model"]
    done, in_write, rounds, equal = 0, 0, 0, 0
    while done < kills or not rounds:
        place = folder / f"round{rounds}"
        place.mkdir()
        while not (place / "final.pt").exists():
            moment = None
            if done < kills and draw.random() < 0.35:
                moment = MOMENTS[in_write % len(MOMENTS)]
            process = child(place, moment, draw.randint(1, 3))
            if done < kills and moment is None:
                # Short enough that a round meets many kills, long enough that it gets on.
                time.sleep(draw.uniform(0, 0.35 * duration))
                os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            if os.WIFSIGNALED(status):
                done += 1
                in_write += moment is not None
            else:
                assert os.WEXITSTATUS(status) == 0, "a resumed run raised"
        final = torch.load(place / "final.pt")["model"]
        rounds += 1
        equal += all(torch.equal(final[k], reference[k]) for k in reference)
    print(json.dumps({"kills": done, "in_write": in_write, "runs": rounds, "bitwise": equal}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
