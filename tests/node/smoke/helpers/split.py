"""Sends the start frame in two pieces, the directory with the first, the second when the first has been taken.

split.py OFFSET RUNTIME aCOMMAND [aARGUMENT...]
"""
import array
import base64
import fcntl
import os
import socket
import struct
import sys
import time

SOCKET, DIRECTORY = 3, 4
SIOCOUTQ = 0x5411  # <linux/sockios.h>; the host's small Python has no termios

offset, runtime = int(sys.argv[1]), int(sys.argv[2])
words = [base64.urlsafe_b64decode(word[1:] + "=" * (-len(word[1:]) % 4)) for word in sys.argv[3:]]
stat = os.fstat(DIRECTORY)
payload = struct.pack(">QQIHH", stat.st_dev, stat.st_ino, runtime, len(words[0]), len(words) - 1) + words[0]
for word in words[1:]:
    payload += struct.pack(">H", len(word)) + word
frame = b"OPTY" + struct.pack(">BBHI", 1, 1, 0, len(payload)) + payload
if offset >= len(frame):
    sys.exit(90)  # the test's way to know that it has seen all offsets

peer = socket.socket(fileno=SOCKET)
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [DIRECTORY]))]
try:
    assert peer.sendmsg([frame[:offset]], rights, socket.MSG_NOSIGNAL) == offset
    deadline = time.monotonic() + 20  # longer than a handshake: then the supervisor says what is late
    while struct.unpack("i", fcntl.ioctl(SOCKET, SIOCOUTQ, b"\0" * 4))[0] > 0:
        assert time.monotonic() < deadline, "the first piece is not taken"
        time.sleep(0.001)
    assert peer.send(frame[offset:], socket.MSG_NOSIGNAL) == len(frame) - offset
except OSError:
    sys.exit(71)  # as the real one: the client looks for the supervisor's word
peer.detach()
