"""What clients say to neurond and to its peers: lease or lock something, give it back, and again."""

import base64
import json

from neurond.bench.load import LoadError
from neurond.wire import INTERFACE


def call(method: str, **parameters: object) -> bytes:
    """Return a varlink call."""
    text = json.dumps({"method": f"{INTERFACE}.{method}", "parameters": parameters}, separators=(",", ":"))
    return text.encode() + b"\0"


RELEASE_HEAD, RELEASE_TAIL = call("Release", lease="*").split(b"*")
LEASE = b'"lease":"'


class Leases:
    """Leases so many chips, and releases them; with `wait`, waits for them if it must."""

    end = b"\0"

    def __init__(self, count: int = 1, *, wait: bool = False) -> None:
        self._acquire = call("Acquire", count=count, **({"wait": 60} if wait else {}))

    def acquire(self, client: int) -> bytes:
        """Return the call for chips."""
        del client
        return self._acquire

    def answer(self, client: int, reply: bytes) -> bytes:
        """Release what was leased, lease again what was released."""
        del client
        at = reply.find(LEASE)
        if at >= 0:
            at += len(LEASE)
            return RELEASE_HEAD + reply[at : reply.index(b'"', at)] + RELEASE_TAIL
        if b'"state"' not in reply:
            raise LoadError(f"neurond answered {reply!r}")
        return self._acquire


class Echoes:
    """Sends what neurond's clients send, and gets it back as it is."""

    end = b"\0"

    def __init__(self) -> None:
        self._acquire = call("Acquire", count=1)
        self._release = RELEASE_HEAD + b"abcd-1234567" + RELEASE_TAIL

    def acquire(self, client: int) -> bytes:
        """Return the first message."""
        del client
        return self._acquire

    def answer(self, client: int, reply: bytes) -> bytes:
        """Send the other message."""
        del client
        return self._release if len(reply) == len(self._acquire) else self._acquire


class RedisLocks:
    """Locks a key of the client's own by SET NX PX with a token, and deletes it."""

    end = b"\r\n"

    def __init__(self) -> None:
        self._locks: dict[int, bytes] = {}
        self._unlocks: dict[int, bytes] = {}

    def acquire(self, client: int) -> bytes:
        """Return the command that locks."""
        if client not in self._locks:
            key = f"lock:{client}"
            self._locks[client] = _redis("SET", key, f"token-{client:08}", "NX", "PX", "30000")
            self._unlocks[client] = _redis("DEL", key)
        return self._locks[client]

    def answer(self, client: int, reply: bytes) -> bytes:
        """Unlock what was locked, lock again what was unlocked."""
        if reply == b"+OK\r\n":
            return self._unlocks[client]
        if reply != b":1\r\n":
            raise LoadError(f"Redis answered {reply!r}")
        return self._locks[client]


def _redis(*words: str) -> bytes:
    return f"*{len(words)}\r\n".encode() + b"".join(f"${len(word)}\r\n{word}\r\n".encode() for word in words)


class EtcdLocks:
    """Locks a name of the client's own, and unlocks it, by etcd's HTTP gateway over one kept connection."""

    end = b"}"
    KEY = b'"key":"'

    def acquire(self, client: int) -> bytes:
        """Return the request that locks."""
        return _post("/v3/lock/lock", {"name": base64.b64encode(b"lock-%d" % client).decode()})

    def answer(self, client: int, reply: bytes) -> bytes:
        """Unlock what was locked, lock again what was unlocked."""
        if not reply.startswith(b"HTTP/1.1 200"):
            raise LoadError(f"etcd answered {reply!r}")
        at = reply.find(self.KEY)
        if at < 0:
            return self.acquire(client)
        at += len(self.KEY)
        return _post("/v3/lock/unlock", {"key": reply[at : reply.index(b'"', at)].decode()})


def _post(path: str, content: object) -> bytes:
    body = json.dumps(content, separators=(",", ":"))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: etcd\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()
