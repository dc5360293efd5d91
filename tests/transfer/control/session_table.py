"""A SessionTable with one offer, and the messages that peers send to it."""

from typing import Any

from msgspec.structs import replace

from headrace.core.config import TransferConfig
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import FirstToken
from headrace.transfer.control.session_table import SessionTable
from headrace.transfer.protocol.matching import BackendOffer, make_hello
from headrace.transfer.protocol.messages import Hello, Reserve, Welcome

CONFIG = TransferConfig(max_peers=2, max_tickets_per_peer=3, peer_timeout_s=3.0)
GEOMETRY = Geometry("float32", layers=4, kv_heads=2, head_dim=8, page_size=16)
OFFER = BackendOffer(
    instance="p" * 32,
    fingerprint="model-1",
    geometries=(GEOMETRY,),
    data_ports=(7001,),
    max_model_len=4096,
)
FIRST = FirstToken(token=7, prompt_tokens=40, cached_tokens=0, finish_reason="stop")


def hello(**changes: Any) -> Hello:
    made = make_hello(
        CONFIG, instance="d" * 32, name="decode", role="decode", fingerprint="model-1",
        geometries=(replace(GEOMETRY, page_size=32),), kv_pages=100, max_model_len=2048, metadata_rows=8,
    )  # fmt: skip
    return replace(made, **changes)


def book(config: TransferConfig = CONFIG, offer: BackendOffer = OFFER) -> SessionTable:
    sessions = iter(range(100))
    made = SessionTable(config, lambda: f"{next(sessions):032x}")
    made.ready(offer)
    return made


def joined(route: bytes = b"a", now: float = 0.0, **changes: Any) -> tuple[SessionTable, str]:
    made = book()
    outcome = made.receive(route, hello(**changes), now)
    [(_, welcome)] = outcome.replies
    assert isinstance(welcome, Welcome)
    return made, welcome.session


def reserve(ticket: str = "t", generation: int = 1, **changes: Any) -> Reserve:
    made = Reserve(ticket=ticket, generation=generation, prompt_tokens=40, cached_tokens=0, pages=pack([8, 9]), row=0)
    return replace(made, **changes)
