"""Configuration of the scheduler: batching, queues, deadlines, and prompts whose KV is held for a later fetch."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from headrace.core.config.flag import HANDOFF, KV_CACHE, SCHEDULING, STAGES, Flag
from headrace.core.types.ranks.coordinate import Rules
from headrace.core.types.ranks.layout import Layout

Chunking = Literal["fixed", "dynamic"]
Policy = Literal["srpt", "fcfs", "slo"]
Eviction = Literal["lru", "turns"]
PromiseLevel = Literal["off", "p50", "p75", "p90", "p95", "p99", "p99.9"]
PROMISES: Mapping[PromiseLevel, float] = {
    "off": 0.0, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999,
}  # fmt: skip
"""Share of promises that are to be kept."""

CPU_CHUNK_TOKENS = 512  # of a pass, where none are configured
GPU_CHUNK_TOKENS = 8192


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and deadlines of the scheduler. A deadline measures the silence of a peer or stage, never queueing."""

    page_size: int = 16
    """Copy of EngineConfig.page_size."""
    kv_pages: int = 0
    """Copy of EngineConfig.kv_pages."""
    max_model_len: int = 0
    """Copy of ModelConfig.max_model_len."""
    vocab_size: int = 0
    """Tokens of the model's vocabulary."""
    stages: Annotated[int, Flag("pp", STAGES, "pipeline-parallel stages, one process each", low=1)] = 1
    dp: Annotated[
        int,
        Flag("dp", STAGES, "data-parallel replicas, each with stages and KV pools of its own", low=1),
    ] = 1
    lockstep: bool = False
    """The replicas share collectives (expert parallelism), so that each takes part in every forward pass."""
    rules: Rules = Rules()
    """What lockstep replicas agree on follows from these."""
    overlap_prefill_tokens: Annotated[
        int,
        Flag(
            "overlap-prefill-tokens", STAGES, "with --overlap: tokens of each replica from which a pass is cut", low=2
        ),
    ] = 512
    overlap_decode_tokens: Annotated[
        int,
        Flag("overlap-decode-tokens", STAGES, "the same for passes that only decode, one token per request", low=2),
    ] = 32
    tp: Annotated[int, Flag("tp", STAGES, "tensor-parallel shards of each stage, one process each", low=1, high=64)] = 1
    pipeline_depth: Annotated[
        int,
        Flag(
            "pipeline-depth",
            STAGES,
            "forward passes in flight beyond one per stage, ordered shortly before they are needed; 0: the next is "
            "planned when one is done",
            low=0,
            high=16,
        ),
    ] = 1
    chunk_tokens: Annotated[
        int,
        Flag("chunk-tokens", SCHEDULING, "token budget of one forward pass; 0: 512 on CPUs, 8192 on GPUs", low=0),
    ] = 0
    """Resolved, never 0, when a scheduler gets it."""
    chunking: Annotated[
        Chunking,
        Flag(
            "chunking",
            SCHEDULING,
            "fixed: chunks of equal length; dynamic: shorter as the prefix grows, so that each takes equal time",
        ),
    ] = "fixed"
    max_running: Annotated[int, Flag("max-running", SCHEDULING, "requests in one forward pass", low=1)] = 64
    metadata_rows: int = 256
    """Requests that may hold a metadata row at once; others wait for one."""
    max_queued_tokens: Annotated[
        int,
        Flag("max-queued-tokens", SCHEDULING, "prompt tokens that may wait; above it requests get 429", low=1),
    ] = 262144
    max_queued_requests: Annotated[
        int,
        Flag("max-queued-requests", SCHEDULING, "requests that may be open; above it requests get 429", low=1),
    ] = 4096
    max_queued_s: Annotated[
        float,
        Flag(
            "max-queued-seconds",
            SCHEDULING,
            "predicted seconds of work that may wait; above it requests get 429; 0: any",
            low=0,
        ),
    ] = 0.0
    max_predicted_ttft_s: Annotated[
        float,
        Flag(
            "max-predicted-ttft",
            SCHEDULING,
            "predicted seconds to the first token above which a request gets 429; 0: any",
            low=0,
        ),
    ] = 0.0
    refuse_unreachable: Annotated[
        bool,
        Flag(
            "refuse-unreachable",
            SCHEDULING,
            "answer a request whose first token is predicted later than its slo_ttft_ms with 429",
        ),
    ] = True
    promise: Annotated[
        PromiseLevel,
        Flag(
            "promise",
            SCHEDULING,
            "share of requests whose time to first token is to stay within the bound that they are promised at their "
            "arrival; by that bound, slo_ttft_ms is refused",
        ),
    ] = "off"
    prefix_cache: Annotated[bool, Flag("prefix-cache", KV_CACHE, "reuse the KV pages of equal prompt prefixes")] = True
    eviction: Annotated[
        Eviction,
        Flag(
            "eviction",
            KV_CACHE,
            "which cached pages leave first; lru: least recently used; turns: of conversations with few turns, aged",
        ),
    ] = "turns"
    retain_percent: Annotated[
        int,
        Flag(
            "retain-percent",
            KV_CACHE,
            "percent of the KV pool that each tenant may keep from eviction with KV hints; 0: none",
            low=0,
            high=100,
        ),
    ] = 10
    disk_admission_turn: Annotated[
        int,
        Flag(
            "disk-admission-turn",
            KV_CACHE,
            "turn of a conversation from which its pages go to disk; 0: those of every prompt, 1: from the second on",
            low=0,
        ),
    ] = 1
    disk_write_gib_per_day: Annotated[
        int,
        Flag("disk-write-gib-per-day", KV_CACHE, "GiB a day that a stage may write to its disk tier; 0: any", low=0),
    ] = 0
    library_salts: tuple[str, ...] = ()
    """Cache salts of the prompts that may use KV files; () where there are none (EngineConfig.kv_library)."""
    kv_events: bool = False
    """Whether changes of the prefix cache are reported to subscribers; set when KvEventsConfig.port is."""
    policy: Annotated[
        Policy,
        Flag(
            "policy",
            SCHEDULING,
            "order in which prompts are computed; srpt: least uncached work left first, fcfs: first come first served, "
            "slo: earliest slo_ttft_ms first",
        ),
    ] = "srpt"
    policy_reserve: Annotated[
        float,
        Flag(
            "policy-reserve",
            SCHEDULING,
            "share of every forward pass for the request that has waited longest, under srpt and slo",
            low=0,
            high=1,
            unit="share",
        ),
    ] = 0.1
    tenant_lag_s: Annotated[
        float,
        Flag(
            "tenant-lag-s",
            SCHEDULING,
            "seconds of computing by which a tenant may be ahead of another before its prompts come last",
            low=0,
        ),
    ] = 5.0
    bootstrap_timeout_s: Annotated[
        float,
        Flag(
            "bootstrap-timeout",
            HANDOFF,
            "seconds a request waits for a decode peer that neither reserves pages for it nor renews its ticket",
            low=0.001,
        ),
    ] = 30.0
    transfer_timeout_s: Annotated[
        float,
        Flag(
            "transfer-timeout",
            HANDOFF,
            "seconds without an acknowledgement or a chunk after which a handoff fails",
            low=0.001,
        ),
    ] = 10.0
    stage_timeout_s: Annotated[
        float,
        Flag("stage-timeout", STAGES, "seconds a stage may be stopped, or compute without coming on", low=0.001),
    ] = 120.0
    start_timeout_s: Annotated[
        float,
        Flag("start-timeout", STAGES, "seconds the stages may take to load, after which they are started again", low=1),
    ] = 600.0
    hold_lease_s: Annotated[
        float,
        Flag(
            "hold-lease",
            HANDOFF,
            "seconds a computed prompt's KV is held for a peer that neither fetches it nor renews the lease",
            low=0.001,
        ),
    ] = 30.0
    hold_limit_s: Annotated[
        float,
        Flag("hold-limit", HANDOFF, "seconds a prompt waits for its decode peer in all, renewals included", low=0.001),
    ] = 600.0
    hold_percent: Annotated[
        int,
        Flag(
            "hold-percent",
            HANDOFF,
            "percent of the KV pool that prompts held for a later fetch may take; beyond it they get 429",
            low=0,
            high=100,
        ),
    ] = 50
    optimistic_start: Annotated[
        bool,
        Flag(
            "optimistic-start",
            HANDOFF,
            "compute prompts before their peer has reserved pages, within the share of --hold-percent",
        ),
    ] = False

    @property
    def longest_wait_s(self) -> float:
        """Seconds that a prompt waits for a peer to reserve it, however often the peer renews its ticket."""
        return max(self.bootstrap_timeout_s, self.hold_limit_s)

    @property
    def credits(self) -> int:
        """Forward passes that may be in flight: ordered, and not computed by the last stage."""
        return self.stages + self.pipeline_depth

    @property
    def layout(self) -> Layout:
        """The ranks of the server."""
        return Layout(pp=self.stages, dp=self.dp, tp=self.tp)
