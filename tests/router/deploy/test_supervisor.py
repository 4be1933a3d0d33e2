"""What the supervisor decides, over processes that are made up: starts, deaths, roll-outs, ends."""

import pytest

from penstock.router.deploy.file import DeployError, Restart, Rollout
from tests.support.made_up_cluster import World, deployment


def states(world: World) -> list[tuple[int, int, str]]:
    return sorted((each.version, each.slot, each.state) for each in world.supervisor.replicas)


def test_a_deployment_comes_up_with_its_keys_in_environments_only() -> None:
    world = World(deployment(count=3)).run()
    assert states(world) == [(1, 0, "ready"), (1, 1, "ready"), (1, 2, "ready")]
    assert world.supervisor.phase == "serving" and world.supervisor.view().is_whole
    assert len(world.processes) == 3 and len(world.routers) == 1
    router, first = world.routers[0], world.processes[0]
    assert router.env["PENSTOCK_BACKEND_API_KEY"] == first.env["PENSTOCK_API_KEY"] != "client"
    assert router.env["PENSTOCK_API_KEY"] == "client" and first.env["A"] == "b"
    keys = {value for name, value in router.env.items() if name.endswith("_KEY")}
    assert len(keys) == 3
    shown = [word for process in (router, first) for word in process.words] + [str(world.supervisor.view())]
    assert not any(key in word for key in keys for word in shown)


def test_a_replica_that_dies_is_taken_out_and_made_up_for_after_a_pause() -> None:
    world = World(deployment()).run()
    dead = world.processes[1]
    dead.death = "killed by signal 9"
    world.run(1)
    assert world.behind[dead.url] == "removing" and dead.is_killed and len(world.running) == 1
    world.run(3)
    assert len(world.running) == 1, "the pause is a second"
    world.run(10)
    assert states(world) == [(1, 0, "ready"), (1, 1, "ready")]
    assert "replica 1 of version 1 killed by signal 9" in world.said()
    assert world.supervisor.view().lines[2].failures == 1


def test_a_crash_loop_is_slowed_down_then_left_alone_and_shown_until_the_next_deploy() -> None:
    wanted = deployment(restart=Restart(limit=2, pause_s=1.0, stable_s=30.0))
    world = World(wanted).run()
    started_s = []
    for _ in range(3):
        count = len(world.processes)
        world.processes[-1].death = "ended with code 3: out of luck"
        died_s = world.now_s
        while len(world.processes) == count and world.now_s < died_s + 60:
            world.run(1)
        started_s.append(world.now_s - died_s)
    assert started_s[0] < 1.5 < started_s[1] < 3 and started_s[2] > 59
    shown = [each for each in world.supervisor.view().lines if each.state == "given up"]
    assert [each.name for each in shown] == ["slot 1"] and "out of luck" in shown[0].reason
    assert not world.supervisor.view().is_whole
    world.supervisor.roll(wanted)
    world.run()
    assert world.supervisor.view().is_whole


def test_deaths_that_are_far_apart_are_no_crash_loop() -> None:
    world = World(deployment(restart=Restart(limit=2, pause_s=1.0, stable_s=30.0))).run()
    for _ in range(6):
        world.run(1, 31.0)
        world.running[-1].death = "killed by signal 9"
        world.run(20)
    assert world.supervisor.view().is_whole


def test_a_replica_out_of_the_routers_reach_is_replaced_and_a_silent_router_is_no_reason() -> None:
    world = World(deployment()).run()
    world.is_router_silent = True
    world.run(200)
    assert len(world.processes) == 2
    world.is_router_silent = False
    world.hung.add(world.processes[0].url)
    world.run(100)
    assert len(world.processes) == 2
    world.run(100)
    assert world.processes[0].is_killed and "out of the router's reach" in world.said()
    assert world.supervisor.view().is_whole


def test_a_router_that_dies_is_started_again_with_the_same_port_and_its_replicas() -> None:
    world = World(deployment()).run()
    world.routers[0].death = "killed by signal 11"
    world.run(2)
    assert len(world.running) == 2
    world.run(20)
    second = world.routers[1]
    assert second.words[second.words.index("--port") + 1] == "80"
    assert {word for word in second.words if word.startswith("http")} == {"http://node:1", "http://node:2"}
    assert world.supervisor.view().is_whole


def test_a_router_that_cannot_be_started_ends_the_deployment_with_its_last_words() -> None:
    world = World(deployment())
    world.run(1)
    world.routers[0].is_up, world.routers[0].death = False, "ended with code 2: port: Address already in use"
    world.run(10)
    assert world.supervisor.phase == "down" and not world.running
    assert world.supervisor.failure == "the router ended with code 2: port: Address already in use"


def test_a_first_version_that_does_not_start_ends_the_deployment() -> None:
    world = World(deployment(), comes_up=False).run(5)
    world.processes[0].death = "ended with code 2: penstock: model: there is none"
    world.run(20)
    assert world.supervisor.phase == "down" and not world.running and not world.routers[0].is_running
    assert world.supervisor.failure == "replica 0 of version 1 ended with code 2: penstock: model: there is none"


@pytest.mark.parametrize(
    ("surge", "max_unavailable", "fewest", "most"), [(1, 0, 3, 4), (0, 1, 2, 3), (3, 0, 3, 6), (1, 2, 1, 4)]
)
def test_a_new_version_takes_over_within_the_bounds(surge: int, max_unavailable: int, fewest: int, most: int) -> None:
    rollout = Rollout(surge=surge, max_unavailable=max_unavailable, drain_s=5.0)
    world = World(deployment(count=3, rollout=rollout)).run()
    world.supervisor.roll(deployment(count=3, words="two", rollout=rollout))
    world.fewest_up.clear()
    num_live = []
    for _ in range(100):
        world.run(1)
        num_live.append(sum(each.is_live for each in world.supervisor.replicas))
    assert states(world) == [(2, 0, "ready"), (2, 1, "ready"), (2, 2, "ready")]
    assert min(world.fewest_up) >= fewest and max(num_live) == most
    assert world.supervisor.phase == "serving" and [each.words[0] for each in world.running] == ["two"] * 3


def test_an_old_replica_is_stopped_only_when_the_router_is_done_with_it_or_the_drain_is_over() -> None:
    world = World(deployment(count=1)).run()
    old = world.processes[0]
    world.in_flight.add(old.url)
    world.supervisor.roll(deployment(count=1, words="two"))
    world.run(20)
    assert world.behind[old.url] == "removing" and not old.is_draining
    world.in_flight.clear()
    world.run(3)
    assert old.is_draining and world.supervisor.phase == "serving"

    slow = world.running[0]
    slow.ignores_drain = True
    world.in_flight.add(slow.url)
    world.supervisor.roll(deployment(count=1, words="three"))
    world.run(20)
    assert not slow.is_draining
    world.run(20)
    assert slow.is_draining and slow.is_running
    world.run(80)
    assert slow.is_killed and world.supervisor.phase == "serving"


def test_a_new_version_that_dies_is_rolled_back_and_the_old_serves_throughout() -> None:
    old = deployment(count=3, rollout=Rollout(surge=1, max_unavailable=1, drain_s=5.0))
    world = World(old).run()
    world.comes_up = False
    world.supervisor.roll(deployment(count=3, words="two", rollout=old.rollout))
    world.fewest_up.clear()
    world.run(5)
    next(each for each in world.running if each.words[0] == "two").death = "ended with code 1: bad weights"
    world.comes_up = True
    world.run(60)
    assert min(world.fewest_up) >= 2
    assert world.supervisor.phase == "serving" and world.supervisor.wanted == old
    assert [each.words[0] for each in world.running] == ["one"] * 3
    assert "ended with code 1: bad weights" in str(world.supervisor.failure)
    world.supervisor.roll(deployment(count=3, words="three"))
    world.run(60)
    assert {each.version for each in world.supervisor.replicas} == {3} and world.supervisor.failure is None


def test_a_new_version_that_is_not_ready_in_time_is_rolled_back() -> None:
    world = World(deployment()).run()
    world.comes_up = False
    world.supervisor.roll(deployment(words="two"))
    world.run(330)
    assert "was not ready within 60 s (rollout.ready-s)" in str(world.supervisor.failure)
    assert world.supervisor.phase == "serving" and [each.words[0] for each in world.running] == ["one"] * 2


def test_a_version_without_a_place_says_what_it_waits_for_then_is_rolled_back() -> None:
    world = World(deployment()).run()
    world.is_full = True
    world.supervisor.roll(deployment(words="two"))
    world.run(40)
    assert "waits for a place: it needs CPU 1 (of 0 0 are free)" in world.said()
    world.run(300)
    assert "found no place" in str(world.supervisor.failure) and world.supervisor.phase == "serving"


def test_a_changed_count_starts_or_ends_the_difference_and_no_other() -> None:
    world = World(deployment(count=2)).run()
    first = world.processes[:2]
    world.supervisor.roll(deployment(count=4))
    world.run()
    assert states(world) == [(1, slot, "ready") for slot in range(4)]
    world.supervisor.roll(deployment(count=1))
    world.run()
    assert states(world) == [(1, 0, "ready")] and world.running == first[:1]


def test_a_crash_loop_of_what_was_there_ends_a_roll_out_of_settings() -> None:
    how = Restart(limit=0, pause_s=1.0, stable_s=30.0)
    world = World(deployment(count=2, restart=how)).run()
    world.comes_up = False
    world.supervisor.roll(deployment(count=3, restart=how))
    world.run(2)
    world.processes[0].death = "ended with code 1: no memory"
    world.run(10)
    assert world.supervisor.phase == "rolling back" and "no memory" in str(world.supervisor.failure)
    world.comes_up = True
    world.supervisor.roll(deployment(count=3, restart=how))
    world.run()
    assert world.supervisor.view().is_whole and len(world.running) == 3


def test_a_replica_that_dies_during_a_roll_out_is_not_made_up_for_in_its_old_version() -> None:
    world = World(deployment(count=3)).run()
    world.comes_up = False
    world.supervisor.roll(deployment(count=3, words="two"))
    world.run(2)
    world.processes[0].death = "killed by signal 9"
    world.run(20)
    assert [each.words[0] for each in world.running] == ["one", "one", "two", "two"]
    world.comes_up = True
    world.run(60)
    assert [each.words[0] for each in world.running] == ["two"] * 3


def test_a_roll_out_under_way_and_a_changed_router_are_refused() -> None:
    world = World(deployment()).run(1)
    with pytest.raises(DeployError, match="version 1 is rolling"):
        world.supervisor.roll(deployment(words="two"))
    world.run()
    with pytest.raises(DeployError, match="router: it has changed"):
        world.supervisor.roll(deployment(router_words=("route", "--port", "9")))
    assert world.supervisor.roll(deployment()) == "nothing has changed: version 1 stays"


def test_an_end_drains_the_router_first_and_waits_no_longer_than_said() -> None:
    world = World(deployment()).run()
    router, replica = world.routers[0], world.processes[0]
    router.ignores_drain = replica.ignores_drain = True
    world.supervisor.stop()
    world.run(50)
    assert router.is_draining and not replica.is_draining
    router.death = "ended with code 0"
    world.run(2)
    assert replica.is_draining and not world.processes[1].is_running
    world.run(100)
    assert world.supervisor.phase == "down" and replica.is_killed and not world.running
