"""ZMQ sockets with the options that the protocol relies on. Nothing here blocks."""

import os
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import zmq

from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.addresses import bracketed, url
from headrace.transfer.sockets.curve_keys import KeyPair

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

UNREACHABLE = (zmq.EAGAIN, zmq.EHOSTUNREACH)
RECEIVE_BATCH = 256  # messages taken in one pass, so that one busy socket does not keep the loop to itself


def bind(
    context: Context,
    host: str,
    port: int,
    *,
    max_frame: int,
    queue: int,
    unread: int = 0,
    silence_s: float = 0.0,
    prepare: Callable[[Socket], None] = lambda _socket: None,
) -> tuple[Socket, int]:
    """Binds a ROUTER. Returns it and its port.

    Args:
        port: 0 takes a free one.
        max_frame: bytes; libzmq closes connections that send frames of more than twice as many.
        queue: messages queued for sending on one connection; 0: no limit.
        unread: messages received from one connection before they are read; 0: libzmq's limit.
        silence_s: after which the kernel closes connections to a machine that is gone; 0: never.
        prepare: called with the socket before it is bound.

    Raises ConfigError when the address is taken or not one of this machine.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unreachable or overflowing connection is an error, not silence
    socket.setsockopt(zmq.SNDHWM, queue)
    if unread:
        socket.setsockopt(zmq.RCVHWM, unread)
    _limit(socket, max_frame)
    _watch(socket, silence_s)
    prepare(socket)
    try:
        if port:
            socket.bind(url("tcp", host, port))
        return socket, port or socket.bind_to_random_port(f"tcp://{bracketed(host)}")
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(
            f"cannot listen on {url('tcp', host, port)}: {os.strerror(error.errno or 0)}; write another address"
        ) from error


def connect(
    context: Context,
    endpoint: str,
    *,
    max_frame: int,
    queue: int,
    silence_s: float = 0.0,
    keys: KeyPair | None = None,
    server_key: str = "",
) -> Socket:
    """Makes a DEALER that connects to tcp://host:port, now or as soon as a server listens there.

    Args:
        max_frame, silence_s: as in bind().
        queue: messages queued for sending.
        keys: CURVE keys of this side; None connects in the clear.
        server_key: CURVE public key of the server, in Z85.

    Raises OSError when no descriptor is free.
    """
    try:
        socket = context.socket(zmq.DEALER)
    except zmq.ZMQError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0)) from error
    socket.setsockopt(zmq.SNDHWM, queue)
    # What may come is bounded by windows and by what was asked. libzmq (4.3.5) aborts the process when a connection
    # breaks while its queue of unread messages is full and is made anew.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    _limit(socket, max_frame)
    _watch(socket, silence_s)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.connect(endpoint)
    return socket


def watch(context: Context, socket: Socket) -> Socket:
    """A socket that can be read when a connection of this one is closed by the other side, or its process has ended.
    Raises OSError when no descriptor is free."""
    # A name that no other monitor has had: libzmq frees that of a closed one some time after close().
    endpoint = f"inproc://closed-{uuid4().hex}"
    try:
        monitor = context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        socket.monitor(endpoint, zmq.EVENT_DISCONNECTED)
    except zmq.ZMQError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0)) from error
    monitor.connect(endpoint)
    return monitor


def take(socket: Socket) -> list[bytes] | None:
    """The next message as bytes, or None."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def take_frames(socket: Socket) -> list[zmq.Frame] | None:
    """The next message without a copy, or None."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def put(socket: Socket, frames: Sequence[bytes]) -> bool:
    """Send a copied message. False when the connection is gone or its queue is full."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in UNREACHABLE:
            return False
        raise
    return True


def put_tracked(socket: Socket, frames: Sequence[bytes], payload: Sequence[Any]) -> list[zmq.MessageTracker] | None:
    """Send frames, then the payload buffers without a copy.

    Returns trackers that are done when libzmq has let go of the buffers; None when the connection is gone.
    """
    try:
        for index, frame in enumerate(frames):
            more = bool(payload) or index + 1 < len(frames)
            socket.send(frame, zmq.NOBLOCK | (zmq.SNDMORE if more else 0))
    except zmq.ZMQError as error:  # only the first frame, the address, can find the connection gone
        if error.errno in UNREACHABLE:
            return None
        raise
    trackers = []
    for index, buffer in enumerate(payload):
        flags = zmq.NOBLOCK | (zmq.SNDMORE if index + 1 < len(payload) else 0)
        tracker = socket.send(buffer, flags, copy=False, track=True)
        if not tracker.done:  # small buffers are copied after all
            trackers.append(tracker)
    return trackers


def host_of(endpoint: str) -> str:
    """The host part of tcp://host:port, brackets of an IPv6 address included."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def _limit(socket: Socket, max_frame: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)  # what a dead connection had queued is dropped, and close() never waits
    socket.setsockopt(zmq.IPV6, 1)
    # libzmq closes connections that send larger frames. The owner of the socket counts and refuses those in between.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_frame)


def _watch(socket: Socket, silence_s: float) -> None:
    """Have the kernel close idle connections whose other machine is gone, after about silence_s. Listeners and
    connections copy the options when they are made.

    ZMTP heartbeats would find stopped processes as well, but libzmq (4.3.5, issues 3937 and 4767) aborts the process
    when one is due on a connection that broke while its queue of unread messages was full: any peer can cause that.
    """
    if silence_s:
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, int(silence_s / 3)))
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, int(silence_s / 3)))
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
