"""Runs swarms in virtual time, with troubles that a seed decides, and checks what comes of them.

python -m tests.programs.simulate_swarm --seeds 0:1000 --closed
python -m tests.programs.simulate_swarm --seed 17 --closed --verbose

Processes are killed or stand still, links fail, objects vanish or are overwritten, the roster
changes. All the time a packet must be applied to just those parameters that it was made from, in
its sender's slot, and in an open run all must have the same parameters in a step. Once the troubles
are over, all must take some steps alike, with packets of each. If they cannot since objects are
gone, nobody may be silent, and they must when these are back. The trace of a run in which something
was wrong has only the troubles that this needs.
"""

import argparse
import itertools
import os
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.virtual_swarm import DEADLINE, DOCUMENTED, NAMES, RESTART, SLOTS, Swarm, write_keys

TROUBLED, CALM, SILENT = 90.0, 400.0, 60.0  # seconds
TOGETHER = 3  # steps that all take alike
FOR_GOOD = 1e9  # seconds
OF_MEMBERS = "kill", "freeze", "leave", "cut off", "slow down"
OF_ALL = "kill all", "freeze all", "cut off all"
OF_OBJECTS = "delete", "delete all", "junk", "older", "another's"
OF_ROSTERS = "join", "take out"
IN_OPEN_RUNS = *OF_MEMBERS, *OF_ALL, *OF_OBJECTS[:2]  # where everybody is trusted
IN_CLOSED_RUNS = *OF_MEMBERS, *OF_ALL, *OF_OBJECTS, *OF_ROSTERS


class Trouble(NamedTuple):
    """What begins at a time and ends after some seconds; its seed says which object it meets."""

    at: float
    kind: str
    name: str
    seconds: float
    seed: int


def draw_troubles(
    rng: random.Random, kinds: Sequence[str], names: list[str], most: int
) -> list[Trouble]:
    def draw() -> Trouble:
        seconds = rng.choice((1.0, 5.0, 15.0, 40.0, FOR_GOOD))
        at, kind, name = rng.uniform(5, TROUBLED), rng.choice(kinds), rng.choice(names)
        return Trouble(at, kind, name, seconds, rng.getrandbits(32))

    return sorted(draw() for _ in range(rng.randint(1, most)))


def strike(swarm: Swarm, trouble: Trouble) -> None:
    """Lets a trouble begin, and plans its end."""
    kind, rng = trouble.kind, random.Random(trouble.seed)
    if kind in OF_OBJECTS:
        harm(swarm, trouble, rng)
    elif kind in OF_ROSTERS:
        change_roster(swarm, kind, rng)
    else:
        swarm.say("!", f"{kind} {'' if kind in OF_ALL else trouble.name}: {trouble.seconds:g} s")
        for name in swarm.present if kind in OF_ALL else [trouble.name]:
            befall(swarm, name, kind.removesuffix(" all"), min(trouble.seconds, 60.0))


def befall(swarm: Swarm, name: str, kind: str, seconds: float) -> None:
    until = swarm.world.now + seconds
    match kind:
        case "kill":
            swarm.kill(name)
            swarm.world.later(seconds, lambda: swarm.start(name))
        case "freeze" if name in swarm.running:
            swarm.running[name].stands_until = until
        case "leave" if name in swarm.running:
            swarm.leaving[name] = seconds
        case "cut off":
            swarm.cut_until[name] = until
        case "slow down":
            swarm.slowness[name] = 20.0
            swarm.world.later(seconds, lambda: swarm.slowness.pop(name, None))


def harm(swarm: Swarm, trouble: Trouble, rng: random.Random) -> None:
    """Deletes or overwrites an object, rather one of the last, or deletes all in its folder."""
    objects = swarm.objects
    folders = {x.partition("/")[0] for x in objects}
    folders &= folders if swarm.keys else {"packets", "snapshots"}
    if not folders:
        return
    folder = rng.choice(sorted(folders))
    keys = [x for x in objects if x.partition("/")[0] == folder]
    chosen = keys[-1 - int(len(keys) * rng.random() ** 3)]
    data = {
        "junk": rng.randbytes(rng.choice((0, 10, 200))),
        "older": objects.versions[chosen][0],
        "another's": objects[rng.choice(keys)],
    }.get(trouble.kind)
    beside = [x for x in keys if x.rpartition("/")[0] == chosen.rpartition("/")[0]]
    for key in beside if trouble.kind == "delete all" else [chosen]:
        swarm.say("!", f"{trouble.kind} {key}: {trouble.seconds:g} s")
        objects.harm(key, data)
        swarm.world.later(trouble.seconds, lambda key=key: objects.restore(key))


def change_roster(swarm: Swarm, kind: str, rng: random.Random) -> None:
    away = [x for x in NAMES if x not in swarm.present]
    if kind == "join" and away:
        new = rng.choice(away)
        swarm.say("!", f"the roster has {new}")
        swarm.change_roster(added=[new])
        swarm.start(new)
    if kind == "take out" and len(swarm.present) > 2:
        gone = rng.choice(swarm.present)
        swarm.say("!", f"the roster is without {gone}")
        swarm.change_roster(without=[gone])


def go(swarm: Swarm, troubles: Sequence[Trouble]) -> None:
    """Lets a swarm train with some troubles, and then in peace until its members are together."""
    world = swarm.world
    if swarm.keys:
        founders, swarm.present = swarm.present, []
        swarm.change_roster(added=founders)
    for name in swarm.present:
        world.later(swarm.rng.choice((0.0, 1.0, 20.0)), lambda name=name: swarm.start(name))
    for trouble in troubles:
        world.later(trouble.at, lambda trouble=trouble: strike(swarm, trouble))
    world.advance(TROUBLED, lambda: bool(swarm.fault))
    calm(swarm)
    if world.advance(CALM, lambda: are_together(swarm)):
        return
    silent = [x for x in swarm.present if swarm.active[x] < world.now - SILENT]
    restored = [key for key in list(swarm.objects.harmed) if swarm.objects.restore(key)]
    swarm.say("!", f"put back: {', '.join(restored) or 'nothing'}")
    if silent:
        swarm.fail(f"{', '.join(silent)} neither took a step nor said why")
    if not (restored and world.advance(CALM, lambda: are_together(swarm))):
        swarm.fail("the members do not come together")


def calm(swarm: Swarm) -> None:
    """Ends all troubles but those of objects, and forgets what was held before."""
    swarm.say("!", "calm")
    for state in swarm.cut_until, swarm.slowness, swarm.leaving, swarm.held, swarm.counted:
        state.clear()
    for process in swarm.running.values():
        process.stands_until = 0.0
    for name in swarm.present:
        swarm.world.later(RESTART, lambda name=name: swarm.start(name))


def are_together(swarm: Swarm) -> bool:
    """Tells whether all have taken some steps alike and sent packets; also where all is over."""
    for error in swarm.world.errors:
        if not isinstance(error, DOCUMENTED):
            swarm.fail(f"{type(error).__name__} in a thread: {error}")
    held = [set(swarm.held[x].items()) for x in swarm.present]
    is_alike = len(set.intersection(*held)) >= TOGETHER
    return bool(swarm.fault) or (is_alike and swarm.counted.issuperset(swarm.present))


def simulate(options: argparse.Namespace, seed: int, keys: pathlib.Path) -> Swarm:
    """Runs a seed; if something is wrong, again without each of its troubles in turn."""

    def run(left_out: Sequence[int] = ()) -> Swarm:
        rng = random.Random(seed)
        number = options.members or rng.randint(2, 5)
        possible = IN_CLOSED_RUNS if options.closed else IN_OPEN_RUNS
        kinds = options.kinds or rng.sample(possible, rng.randint(1, 4))
        troubles = draw_troubles(rng, kinds, NAMES[:number], options.troubles)
        numbers.extend(range(len(troubles))) if not numbers else None
        closed = keys if options.closed else None
        swarm = Swarm(rng, number, closed, options.deadline or None, options.verbose)
        with swarm.in_virtual_time():
            go(swarm, [x for n, x in enumerate(troubles) if n not in left_out])
        return swarm

    numbers: list[int] = []
    left_out = list(map(int, options.without.split(","))) if options.without else []
    found = run(left_out)
    for number in numbers if found.fault and not options.verbose else ():
        if (fewer := run([*left_out, number])).fault:
            found, left_out = fewer, [*left_out, number]
    if left_out:
        found.say("!", f"without the troubles {','.join(map(str, left_out))}")
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", nargs="+", default=["0:100"], help="the first, and the one after the last"
    )
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--members", type=int, help=f"2 to {SLOTS}; by default the seed says it")
    parser.add_argument("--troubles", type=int, default=8, help="at most, in a run")
    parser.add_argument("--kinds", nargs="+", help="of troubles; by default a few in each run")
    parser.add_argument("--without", help="numbers of troubles to leave out, such as 0,3")
    parser.add_argument("--closed", action="store_true", help="for members only")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE, help="0 for three median steps, as by default"
    )
    parser.add_argument("--verbose", action="store_true", help="with each step and object")
    options = parser.parse_args(words)
    ranges = [range(*map(int, x.split(":"))) for x in options.seeds]
    seeds = list(itertools.chain(*ranges)) if options.seed is None else [options.seed]
    if hasattr(os, "sched_setaffinity"):  # on one core threads hand over twice as fast
        os.sched_setaffinity(0, [random.choice(sorted(os.sched_getaffinity(0)))])
    started, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        write_keys(pathlib.Path(folder))
        for number, seed in enumerate(seeds, 1):
            swarm = simulate(options, seed, pathlib.Path(folder))
            failed += [seed] if swarm.fault else []
            if swarm.fault or options.verbose:
                print(f"\nseed {seed}: {swarm.fault or 'well'}", *swarm.trace, sep="\n", flush=True)
            if number % 20 == 0 or number == len(seeds):
                pace = number / (time.monotonic() - started)
                print(f"{number} runs, {pace:.1f} a second, failed: {failed}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # otherwise the order of sets is left to chance
        environment = os.environ | {"PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
        os.execve(sys.executable, sys.orig_argv, environment)
    sys.exit(main())
