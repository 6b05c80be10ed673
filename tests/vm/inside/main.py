"""Runs the checks that this machine, at this boot, is there for; then reboots it, or switches it off.

Which ones these are is in STAGES: for each instance type a list for each boot, in their order. They build on each
other: a check finds the machine as the one before it left it, with the service up and no chip leased.
"""

import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from . import containers, hotplug, installing, jobs, service
from .kit import PAYLOAD, Failed, Port, run, tidy

Check = Callable[[], str]

STAGES: dict[str, list[list[Check]]] = {
    "trn1.32xlarge": [
        [
            installing.package_installs_where_no_chips_are,
            service.chips_are_there_as_soon_as_the_module_is,
            jobs.open_nodes_make_leases_advisory,
            jobs.the_rule_shuts_the_nodes,
            jobs.a_member_opens_exactly_its_chips,
            jobs.a_stranger_is_refused,
            jobs.run_enforce_confines_root,
            containers.a_container_opens_exactly_its_chips,
            hotplug.a_leased_chip_goes_and_comes_back,
            hotplug.the_module_can_be_reloaded,
            service.a_killed_daemon_is_back_with_all_leases,
            service.stop_and_restart_touch_no_job,
            service.docker_may_be_stopped,
            containers.docker_restart_ends_containers_and_leases,
            containers.live_restore_keeps_containers_and_leases,
            service.reload_takes_settings_and_refuses_wrong_ones,
            service.journal_has_what_happened,
            service.the_running_unit_is_confined,
            service.doctor_finds_nothing_wrong,
            installing.an_upgrade_under_load_keeps_all_leases,
            installing.work_is_left_for_the_reboot,
        ],
        [
            installing.a_reboot_voids_all_leases,
            installing.the_chips_of_a_released_lease_are_free_again,
            installing.removal_touches_no_job,
            installing.a_purge_leaves_nothing,
        ],
    ],
    "inf2.48xlarge": [
        [
            installing.package_installs_where_no_chips_are,
            service.other_instance_type_is_known,
            service.doctor_misses_a_chip,
            service.a_daemon_that_hangs_is_replaced,
            service.nodes_without_any_rule_are_as_the_kernel_made_them,
        ]
    ],
}

ALWAYS = {
    "package_installs_where_no_chips_are",
    "chips_are_there_as_soon_as_the_module_is",
    "the_rule_shuts_the_nodes",
    "other_instance_type_is_known",
}
"""Without these the others have nothing to look at; --only leaves them in."""

BOOT = Path("/var/lib/checks-boot")


def main() -> None:
    """Do what this boot is for."""
    port = Port()
    stages = STAGES[Path("/sys/devices/virtual/dmi/id/product_name").read_text().strip()]
    boot = int(BOOT.read_text()) if BOOT.exists() else 0
    BOOT.write_text(str(boot + 1))
    port.tell("up", f"boot {boot + 1} of {len(stages)}")
    only = (PAYLOAD / "only").read_text()
    for check in stages[boot]:
        if only in check.__name__ or check.__name__ in ALWAYS:
            do(check, port)
    again = boot + 1 < len(stages)
    port.tell("reboot" if again else "end")
    run("systemctl", "--no-block", "reboot" if again else "poweroff")


def do(check: Check, port: Port) -> None:
    """Run one check, tidy up after it and tell how it went; with what the journal has, if it failed."""
    began, since = time.monotonic(), time.strftime("%H:%M:%S")
    ok = True
    try:
        try:
            text = check()
        finally:
            tidy()
    except Failed as failed:
        ok, text = False, str(failed)
    except Exception:  # noqa: BLE001 - the others are to be heard as well
        ok, text = False, traceback.format_exc()
    name = check.__name__.replace("_", " ")
    port.tell("check", text, name=name, ok=ok, seconds=time.monotonic() - began)
    if not ok:
        journal = ["journalctl", "--no-pager", f"--since={since}", "--lines=80", "--output=short-precise"]
        done = subprocess.run(journal, capture_output=True, text=True, check=False)
        port.tell("log", done.stdout)


if __name__ == "__main__":
    main()
