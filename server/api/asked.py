"""A checked request for completions, of whatever API: its jobs, and where their KV goes or comes from."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from core.config import ServerConfig
from core.errors import ErrorInfo, HeadraceError
from server.api.bodies import parse_body
from server.api.sampling import seeded
from server.generation import Job
from server.naming import BOOTSTRAP_PORT, Jobs, Names, Origin, hand_overs, origins
from server.service import Service


class Asked(msgspec.Struct, frozen=True):
    """What a request asks for: choices continuations of each prompt. base: what its jobs have in common. salts: of the
    prefix cache, one for each prompt; empty where all have that of the base."""

    base: Job
    prompts: Sequence[tuple[int, ...]]
    choices: int
    salts: Sequence[str] = ()

    def jobs(self, max_model_len: int) -> list[Job]:
        """One job for each prompt and choice, prompt by prompt."""
        salts = self.salts or [self.base.cache_salt] * len(self.prompts)
        jobs = [
            self._job(max_model_len, prompt, salt, choice)
            for prompt, salt in zip(self.prompts, salts, strict=True)
            for choice in range(self.choices)
        ]
        if len(jobs) == 1:
            return jobs
        return [msgspec.structs.replace(job, rid=f"{job.rid}-{index}") for index, job in enumerate(jobs)]

    def _job(self, max_model_len: int, prompt: tuple[int, ...], salt: str, choice: int) -> Job:
        """max_tokens is cut to the room that the prompt leaves."""
        base = self.base
        room = max_model_len - len(prompt) if max_model_len else base.sampling.max_tokens
        tokens = min(base.sampling.max_tokens, room)
        sampling = msgspec.structs.replace(
            seeded(base.sampling, choice), max_tokens=tokens, min_tokens=min(base.sampling.min_tokens, tokens)
        )
        return msgspec.structs.replace(base, prompt=prompt, sampling=sampling, cache_salt=salt)


def jobs_to_hand_over(service: Service, asked: Asked, names: Names) -> list[Job]:
    """The jobs of a request to a prefill server. Raises HeadraceError for one that names no handoff: nothing is decoded
    here."""
    jobs = asked.jobs(service.max_model_len)
    given = hand_overs(names, Jobs(len(asked.prompts), asked.choices), secrets.token_hex(16))
    if given is None:
        message = (
            "a prefill server does not decode: send kv_transfer_params.do_remote_decode or bootstrap_room as a router "
            "does, use POST /v1/prefill, or ask a decode server"
        )
        raise HeadraceError(ErrorInfo(code="wrong_role", message=message, status=404))
    return [
        msgspec.structs.replace(job, ticket=over.ticket, hold=over.hold) for job, over in zip(jobs, given, strict=True)
    ]


def jobs_to_decode(service: Service, asked: Asked, names: Names, config: ServerConfig) -> list[Job]:
    """The jobs of a request to a server that decodes. Names mean something to a decode server only."""
    jobs = asked.jobs(service.max_model_len)
    port = config.bootstrap_port or BOOTSTRAP_PORT
    found = origins(names, Jobs(len(asked.prompts), asked.choices), port) if config.role == "decode" else None
    if found is None:
        return jobs
    return [_collecting(job, origin) for job, origin in zip(jobs, found, strict=True)]


def _collecting(job: Job, origin: Origin) -> Job:
    """The job with its origin. Logprobs of the prompt are in the prefill server's answer, which goes to the router."""
    sampling = msgspec.structs.replace(job.sampling, prompt_logprobs=None)
    return msgspec.structs.replace(job, sampling=sampling, origin=origin)


@contextmanager
def telling_the_other_side(service: Service, config: ServerConfig, raw: bytes) -> Iterator[None]:
    """When a request is refused in this block, whoever waits for the other half of its tickets is told at once."""
    try:
        yield
    except HeadraceError as error:
        if config.role == "prefill":
            service.refuse(_tickets(raw), error.info)
        elif config.role == "decode":
            port = config.bootstrap_port or BOOTSTRAP_PORT
            with suppress(HeadraceError):
                service.release(origins(_names(raw), _counted(raw), port) or (), error.info.message)
        raise


def _tickets(raw: bytes) -> list[str]:
    """The tickets that a refused body names, as far as it can be read."""
    found: list[str] = []
    with suppress(HeadraceError):
        if (ticket := parse_body(raw, _Ticket).ticket) is not None:
            found.append(ticket)
    with suppress(HeadraceError):
        names = _names(raw)
        minted = names.kv_transfer_params is not None and names.kv_transfer_params.transfer_id is None
        given = hand_overs(names, _counted(raw), "")
        found += [over.ticket for over in given or () if over.ticket is not None and not minted]
    return found


def _names(raw: bytes) -> Names:
    return parse_body(raw, Names)


class _Ticket(msgspec.Struct):
    ticket: str | None = None


class _Counted(msgspec.Struct):
    """What the number of jobs depends on, in the bodies of all routes."""

    prompt: Any = None
    text: Any = None
    input_ids: Any = None
    n: Any = None
    sampling_params: Any = None


def _counted(raw: bytes) -> Jobs:
    body = parse_body(raw, _Counted)
    given = next((value for value in (body.prompt, body.text, body.input_ids) if value is not None), None)
    several = isinstance(given, list) and not all(isinstance(item, int) for item in given)
    n = body.sampling_params.get("n") if isinstance(body.sampling_params, dict) else body.n
    return Jobs(len(given) if several and isinstance(given, list) else 1, n if isinstance(n, int) and n > 0 else 1)
