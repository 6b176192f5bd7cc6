"""A policy gradient with one learner and four actors: actors pull the newest weights, play, and push trajectories over a queue.

    torchquorum run --workers 1 examples/actors/train.py
    torchquorum run --workers 1 examples/actors/train.py --steps 300 --actors 8

The learner is the worker of an ordinary run. Actors are no workers: each has a `tq.Reader`, which costs the run nothing, and may be slow,
or die. The environment is a corridor: at its right end there is a reward, at its left end there is none.
"""

import argparse
import multiprocessing as mp
import queue
from typing import Any

import torch
from torch import nn

import torchquorum as tq

LENGTH, LONGEST, EPISODES = 9, 30, 8


class Policy(nn.Module):
    """The probability of going right, at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(LENGTH, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Returns logits of left and right."""
        return self.layers(nn.functional.one_hot(places, LENGTH).float())


def play(policy: Policy) -> tuple[list[int], list[int], float]:
    """Returns the places and actions of an episode, and its return: less for one that takes long."""
    place, places, actions = LENGTH // 2, list[int](), list[int]()
    while 0 < place < LENGTH - 1 and len(places) < LONGEST:
        with torch.no_grad():
            action = int(torch.distributions.Categorical(logits=policy(torch.tensor(place))).sample())
        places.append(place)
        actions.append(action)
        place += 1 if action else -1
    return places, actions, (1.0 if place == LENGTH - 1 else 0.0) * 0.98 ** len(places)


def act(number: int, address: str, trajectories: Any) -> None:
    """An actor: plays with the newest weights there are, until the run is over."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    policy = Policy()
    with tq.Reader(address, name=f"actor {number}") as reader:
        while not reader.over:
            version = reader.pull(policy)
            trajectories.put((int(version), [play(policy) for _ in range(EPISODES)]))


def learn(session: Any, optimizer: Any, policy: Policy, trajectories: Any) -> None:
    """The learner: every batch of episodes is a step."""
    average = 0.0
    while not session.should_stop():
        try:
            version, episodes = trajectories.get(timeout=60)
        except queue.Empty:
            raise SystemExit("no actor has played for a minute") from None
        returns = torch.tensor([gained for _, _, gained in episodes])
        average = 0.95 * average + 0.05 * float(returns.mean())
        loss = torch.zeros(())
        for places, actions, gained in episodes:
            chosen = torch.distributions.Categorical(logits=policy(torch.tensor(places))).log_prob(
                torch.tensor(actions)
            )
            loss = loss - chosen.sum() * (gained - average) / len(episodes)
        behind = session.global_step - version
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if session.local_step % 50 == 0:
            print(f"step {session.global_step}: return {average:.2f}, weights {behind} versions old", flush=True)
    print(f"finished: return {average:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--actors", type=int, default=4)
    args = parser.parse_args()

    task = tq.join()
    torch.manual_seed(0)
    policy = Policy()
    optimizer = tq.Optimizer(torch.optim.Adam(policy.parameters(), lr=0.02), rule=tq.Async())
    spawn = mp.get_context("spawn")
    trajectories = spawn.Queue(maxsize=2 * args.actors)  # full: actors wait, so that what is learnt from is not old
    address = task.cluster.address(tq.types.TaskId("ps", 0))
    actors = [spawn.Process(target=act, args=(k, address, trajectories), daemon=True) for k in range(args.actors)]
    for actor in actors:
        actor.start()
    with tq.Session(task, policy, optimizer, last_step=args.steps) as session:
        learn(session, optimizer, policy, trajectories)
    for actor in actors:
        actor.terminate()


if __name__ == "__main__":
    main()
