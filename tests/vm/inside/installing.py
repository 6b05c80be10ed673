"""The package: installed, upgraded under load, removed and purged."""


from inside.kit import IMAGE, PAYLOAD, SOCKET, expect, is_active, mode_of, run, until


def package_installs_where_no_chips_are() -> str:
    """It installs while Docker is stopped and the module is not loaded, and its service waits for both."""
    run("systemctl", "stop", "docker.service", "docker.socket")
    run("dpkg", "--install", str(PAYLOAD / "packages/1.deb"))
    until("the service is up", lambda: is_active("neurond"))
    expect(mode_of(str(SOCKET)) == "root:neuron 0660", f"the socket is {mode_of(str(SOCKET))}")
    run("gpasswd", "--add", "member", "neuron")
    said = run("neurond", "run", "-n", "1", "--no-wait", "--", "true", code=75, user="member")
    run("systemctl", "start", "docker")
    run("docker", "import", str(PAYLOAD / "image.tar"), IMAGE)
    return f"active, socket root:neuron 0660; without chips run says {said!r}"
