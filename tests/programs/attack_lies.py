"""What a member tries with its key: a function for each kind, called again and again.

`attack_swarm.py` lets a member do it that trains with the others.
"""

import json
import re
import time


def another_slot(liar, n: int) -> None:
    """Its own packet, claim, snapshot and attestation under names of another member."""
    store, step = liar.store, liar.number + 1  # nobody has sent anything there
    for key, data in {
        f"packets/{step:08d}/000.packet": store.get(f"packets/{step - 1:08d}/002.packet"),
        f"slots/000/{990_000_000 + n}": store.get(f"slots/002/{liar.member.incarnation:06d}"),
        f"slots/000/{990_000_000 + n}.left": b"",
        f"attested/{step:08d}/001": b"0" * 64,
    }.items():
        store.put(key, data or b"{}")


def alone(liar, n: int) -> None:
    """A manifest that lists its own packet alone, as soon as that is sent."""

    def propose(liar, step: int, packet: bytes) -> None:
        line = (liar.store.get(f"packets/{step:08d}/002.packet") or b"").partition(b"\n")[0]
        before = json.loads(liar.store.get(f"manifests/{step - 1:08d}") or b"{}")
        if line and before:
            said = json.loads(line) | {"time": time.time(), "roster": before["roster"]}
            liar.store.put(f"manifests/{step:08d}", json.dumps(said).encode())

    liar.after_send = propose


def a_second_packet(liar, n: int) -> None:
    """Another valid packet in place of the first one, at a moment when some may have that."""
    earlier: list[bytes] = []

    def send_again(liar, step: int, packet: bytes) -> None:
        earlier.append(packet)
        time.sleep(0.02 * (step % 4))
        liar.member.send(step, earlier[0])

    if n == 0:
        liar.after_send = send_again


def forged_snapshots(liar, n: int) -> None:
    """Trains with other parameters, which it writes and signs in its turns, and in others'."""
    liar.change_params = lambda params: {name: x + 0.5 for name, x in params.items()}
    for key in liar.store.names("snapshots"):
        if key.endswith(".002.json"):
            data = liar.store.get(f"snapshots/{key}") or b""
            liar.store.put(f"snapshots/{liar.number + 6:08d}.000.json", data)
            liar.store.put(f"snapshots/{key.replace('.002', '.001')}", data)


def here_without_end(liar, n: int) -> None:
    liar.is_silent = True


def a_weight_of_1e15(liar, n: int) -> None:
    if n == 0:
        liar.settings = {"weight": 1e15}
        liar.again.set()


def a_roster_without_it(liar, n: int) -> None:
    """Goes on with the roster that it was in, puts it back, and signs what comes to its mind."""
    run, place = liar.run_, liar.store.inner
    if n == 0:
        liar.was_in = place.get("roster.json")
        liar.store.look_for_roster = lambda: None
        liar.ending.set()
        run.command("roster", run.url, "--owner", "owner.key", "--without", liar.name)
        until = time.monotonic() + 60
        while liar.name in run.ledger.counted[max(run.ledger.counted)]:
            assert time.monotonic() < until, "the new roster holds in no step"
            time.sleep(0.2)
        time.sleep(2)  # for the steps that had been decided before
        run.at_least, run.expelled = 2, (liar.name,)
        liar.is_out_of = place.get("roster.json")
    place.put("roster.json", liar.was_in)
    step = max(run.ledger.counted) + 1
    for key in f"packets/{step:08d}/002.packet", f"manifests/{step:08d}", "run.json":
        known = re.sub(r"\d{8}", f"{liar.number - 1:08d}", key)
        liar.store.put(key, liar.store.get(known) or b"{}")
    time.sleep(0.2)
    place.put("roster.json", liar.is_out_of)  # as its owner does


def other_settings(liar, n: int) -> None:
    """Settings with which nobody else can take part."""
    facts = json.loads(liar.store.get("run.json") or b"{}")
    liar.store.create("run.json", json.dumps(facts | {"slots": "99"}).encode())


LIES = {
    "key: another's slot": another_slot,
    "key: a manifest of itself alone": alone,
    "key: a second packet in a step": a_second_packet,
    "key: forged snapshots": forged_snapshots,
    "key: here without end": here_without_end,
    "key: a weight of 1e15": a_weight_of_1e15,
    "key: other settings": other_settings,
    "key: a roster without it": a_roster_without_it,
}
