"""What the systemd journal has for each line of the log: a MESSAGE_ID that never changes, and a sentence.

`systemd/neurond.catalog` has what follows from each and what to do, for `journalctl --catalog`. A new event of the log
takes a new id (`systemd-id128 new`) and a text in both.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Message(NamedTuple):
    """`id` is the MESSAGE_ID; `sentence` names fields of the line in braces."""

    id: str
    sentence: str


MESSAGES: Mapping[str, Message] = {
    "ledger.opened": Message("bcad2f6b955d42279f7ddbfad909238d", "a new ledger begins"),
    "chip.added": Message("a6386445080f4bacab5c41245d29d29a", "chip {chip} is there"),
    "chip.changed": Message("28b62b7413284ab5acb44eb4dff12034", "other facts hold of chip {chip}"),
    "chip.removed": Message("d21526c99dd149348f42f9e43f82137c", "chip {chip} has vanished"),
    "chip.foreign": Message(
        "f752de47828841cf9363f95c8d4d0531", "processes that use chip {chip} without a lease: {users}"
    ),
    "lease.queued": Message("c1c83ce8b1304843b9af5dca59af09e4", "{owner} waits for chips ({asked}) as {lease}"),
    "lease.granted": Message(
        "a255aeb2e866428c8b35bf6e1f16d2b2", "{owner} got chips {chips} as lease {lease}, bound to its {binding}"
    ),
    "lease.bound": Message("915ef4551162443cbf8e53b39b727cf8", "lease {lease} is bound to its {binding} now"),
    "lease.draining": Message("d5139eee904944b289526f3c0b7c7b58", "lease {lease} is at its end"),
    "lease.stuck": Message(
        "7a464dab0a0e4333aba028fe4796fc44", "the chips of lease {lease} are still open, so it is stuck: {users}"
    ),
    "lease.revived": Message(
        "f6fff10e678243599a21c24c345367e5", "lease {lease} goes on, as its container was started again"
    ),
    "lease.ended": Message("75eb8189a2144c16953620434f580f77", "lease {lease} has ended"),
    "discovery.failed": Message("db338c504b1240889a2758b8f953aef1", "the chips could not be looked at"),
    "discovery.monitor_restarted": Message(
        "51f2135084134402b46dbcb6616ccdac", "the udev monitor failed and was made anew"
    ),
    "usage.failed": Message("04382d0c40cb4909a924f7a0cd7a79e2", "a look at who uses the chips failed"),
    "neurond.stopped": Message("188bbef044234e54b041577875128cc3", "neurond has stopped, with {leases} leases"),
    "config.no_group": Message("88628bbe41bb462a9183e0de362f335d", "there is no group {group}"),
    "config.socket_kept": Message("1ed5bfea563c4d0093855d6a5ef41dec", "the socket could not be given to the group"),
    "neurond.blind": Message("ed8f3f0a6b2b44efb02c7420fb838682", "neurond can't see who uses the chips"),
    "neurond.ready": Message(
        "e75a941bf99947eb8996898683cf6fd0",
        "neurond is ready on a {instance_type} with {chips} chips and {leases} leases",
    ),
    "access.failed": Message(
        "70d6cea90cef4d8ba4dd896fda0847ff", "the access list of the node of chip {chip} could not be set"
    ),
    "lease.forced": Message("48295f511a104c9d9a083a3c7a1da9ba", "lease {lease} of {owner} is changed by root"),
    "containers.failed": Message("d0fe8e3abc504ba3a3081d223f15132e", "a look at the containers failed"),
    "engine.failed": Message("dd061c0b211f45d7acbb81d2baf5308b", "Docker does not answer"),
    "engine.absent": Message("96866844a6c54db6b173f41dd1d7bd55", "there is no Docker"),
    "container.not_removed": Message("2ae669a250d54d2bb62549dd22f9abdd", "container {container} could not be removed"),
    "container.removed": Message("a5bbfc9e139842cf86d799425985325e", "container {container} was removed, {status}"),
    "engine.events_failed": Message("49f31e19beaa4a55acb28ad54a252060", "the events of Docker could not be read"),
    "journal.not_compacted": Message(
        "19b6e566f6614f87b31837230f22afd6", "the journal of leases could not be made shorter"
    ),
    "journal.failed": Message("53421cab12a34655ba0077941fcf4f26", "the journal of leases can't be written"),
    "journal.recovered": Message("0a4c0875fa4e44fbbd2901f7a77fec6d", "the journal of leases can be written again"),
    "journal.found": Message("0ff67d656d684ce59a5f200d5a3d6cc1", "the journal of leases is {verdict}"),
    "journal.kept_aside": Message(
        "522f7a52bd1f4a0b901992f8eb136533", "a journal of leases that can't be used is now at {path}"
    ),
    "lease.dropped": Message("0adb98e1b1044171a59201cc2e221dab", "lease {lease} of chips {chips} is void"),
    "lease.rebuilt": Message(
        "e00a3866396d4b30928a81f39b8dff0a", "lease {lease} of chips {chips} was rebuilt from container {container}"
    ),
    "container.not_inspected": Message(
        "f05e508c68d14b97b761d647f3d335d0", "container {container} could not be asked about"
    ),
    "cdi.on": Message("2e9f186d08dc4511be33f43bd6dbf441", "leases have names as devices (CDI), in {directories}"),
    "cdi.off": Message("79631ed2787a458480d0aa06c847796c", "leases have no names as devices (CDI)"),
    "cdi.conflict": Message("04971e32f69b4d5a8cd9cdd05a2025ea", "{file} gives names of neurond's kind too"),
    "cdi.failed": Message("33f80bc6e241456d8d2f7a15f3bab2d2", "{file} can't be written"),
    "cdi.recovered": Message("9b5ad604bdea4873bd958169b1f8f99a", "{file} can be written again"),
    "cdi.not_removed": Message("3e83da6e09514f0dbd1dab36144baef2", "{file} can't be removed"),
    "server.handler_failed": Message("24ca6fcba7fc48ef815a527e724340c1", "a call failed by a fault in neurond"),
    "config.failed": Message("7feaf301e1ae4a729f87c19ecd957eb4", "the settings could not be read again"),
    "config.wrong": Message("90efb5836f954a2193b6d801ca690827", "a setting is wrong: {problem}"),
    "config.reloaded": Message("43427299faa3488ea75e1c587ede63f9", "the settings were read again; changed: {changed}"),
    "config.pending": Message("a5703f6ce15c4f3fb6ad0e1b3a0656f2", "{key} = {value} waits for the next start"),
    "container.not_leased_again": Message(
        "70e2bbb804474b42b47ff538848c8b68",
        "chips for container {container}, which was started again, can't be leased now",
    ),
    "container.leased_again": Message(
        "477aa345df00496c9c3c23cf6e961a9d",
        "container {container} was started again and has chips {chips} as lease {lease}",
    ),
    "container.conflict": Message(
        "7ab398b2eb594b5ba864340f87274cc4",
        "container {container} was started again on chips {chips}, which belong to {leases}",
    ),
    "container.not_stopped": Message(
        "ea6b9d90e8cb4bb59b675d7f51bddb5e", "container {container}, which runs on chips of others, could not be stopped"
    ),
    "task.failed": Message("c4966acd8df1424d8df03c3eb548a020", "task {task} of lease {lease} failed"),
    "events.not_logged": Message(
        "046bc5a71bd9403cb555610a4480ad29", "there were more events than are logged ({limit})"
    ),
    "log.lost": Message("d9435c1459644b86a0a11157a74b7a69", "{lines} lines of the log were lost"),
}
"""By the event, which the field NEUROND_EVENT has."""
