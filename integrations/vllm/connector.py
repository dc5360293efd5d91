"""HeadraceConnector: implements vLLM's KV connector interface (v1, as of vLLM 0.32) by the planner and the worker.

vLLM makes one instance in its scheduler, which uses the planner, and one in its worker, which uses the worker.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from headrace.core.runtime.clock import SystemClock
from headrace.core.types.errors import ConfigError
from headrace.integrations.vllm.model import cache_geometry, model_fingerprint, ordered_layers
from headrace.integrations.vllm.planner import LoadPlanner, StepCommands
from headrace.integrations.vllm.settings import read_settings
from headrace.integrations.vllm.worker import Worker
from headrace.peer.records import PeerLimits
from headrace.peer.staging import Staging
from headrace.peer.thread import PeerThread

log = logging.getLogger("vllm.headrace")  # below "vllm", so that vLLM's logging shows it


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """Metadata from the scheduler's connector to the worker's, once per step."""

    step: StepCommands
    idle: bool  # no token is computed in this step


class HeadraceConnector(KVConnectorBase_V1):
    """Loads prompts' KV from Headrace prefill servers; a KV consumer only."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError for parallel sizes, KV cache groups or settings that are not supported."""
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        degrees = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        if degrees != (1, 1):
            raise ConfigError(f"tensor and pipeline parallel sizes {degrees}: this connector serves one worker, (1, 1)")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ConfigError(f"{len(kv_cache_config.kv_cache_groups)} groups of KV caches: this connector fills one")
        self._settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._planner: LoadPlanner = self.make_planner()
        self._worker: Worker | None = None
        self._peer: PeerThread | None = None
        self._idle = False

    def make_planner(self) -> LoadPlanner:
        """The planner of the scheduler's half; tests override it."""
        return LoadPlanner()

    # Called in the scheduler's process.

    def on_new_request(self, request: Any) -> None:
        """A request has arrived: renew its ticket's lease until it is loaded."""
        self._planner.added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond the computed ones, whether asynchronously); (None, False): ask again
        later."""
        return self._planner.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """KV cache groups that loads fill: all."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks: load its ticket into them."""
        self._planner.allocated(request, tuple(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the worker is told in this step."""
        return StepMetadata(self._planner.take_commands(), idle=not scheduler_output.total_num_scheduled_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """The worker has finished with these requests."""
        self._planner.loaded(set(connector_output.finished_recving or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. (False, None): its blocks may be freed at once."""
        self._planner.finished(request)
        return False, None

    # Called in the worker's process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the peer thread. kv_caches: each attention layer's cache, by layer name.

        Raises ConfigError for a model that is not supported.
        """
        config, settings = self._vllm_config, self._settings
        layers = ordered_layers(config.compilation_config.static_forward_context, kv_caches)
        geometry = cache_geometry(layers)
        max_model_len = config.model_config.max_model_len
        staging = Staging(geometry, settings.staging_tokens or 2 * max_model_len)
        limits = PeerLimits(
            fingerprint=settings.fingerprint or model_fingerprint(config.model_config.model),
            model=config.model_config.model,
            rules=settings.rules(),
            pages=staging.pages,
            connect_timeout_s=settings.connect_timeout_s,
            load_timeout_s=settings.load_timeout_s,
            server_keys=settings.server_keys(),
        )
        self._peer = PeerThread(
            limits,
            staging,
            name=f"vllm {config.instance_id}",
            max_model_len=max_model_len,
            transfer=settings.transfer(),
            api_key=settings.prefill_api_key,
        )
        self._peer.start()
        staged = torch.from_numpy(staging.data).view(layers[0][1].dtype)
        self._worker = Worker(self._peer, layers, staged, config.cache_config.block_size, SystemClock())
        log.info("headrace: fingerprint %s, %s, staging %d tokens", limits.fingerprint, geometry, staged.shape[3])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Hand this step's commands to the peer; loads run in the background."""
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, StepMetadata):
            self._idle = metadata.idle
            self._worker.submit(metadata.step.commands, metadata.step.blocks)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have finished or failed since the last step."""
        finished, failed = self._worker.poll(idle=self._idle) if self._worker is not None else (set(), set())
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads are complete before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: this connector saves no KV."""

    def wait_for_save(self) -> None:
        """Does nothing: this connector saves no KV."""

    def shutdown(self) -> None:
        """Stop the peer thread."""
        if self._peer is not None:
            self._peer.stop()
