"""Lists for every switch the tests that observe its effect, not only that the value was read.

`test_every_switch` compares it with the code: a field without an entry fails, and so does a test that does not exist. A switch
whose value passes through several programs has a test for each: one for what the operator makes of a field of the resource,
say, and one for what an agent does with the resulting setting.
"""

from __future__ import annotations

_AGENT, _CLIENT, _OPERATOR, _WIRE = "tests/agent", "tests/client", "tests/operator", "tests/wire"
_AS_SET = f"{_AGENT}/test_agent_as_it_is_set.py"
_CHANGE = f"{_AGENT}/test_what_settings_change.py"
_LIMITS = f"{_AGENT}/test_engine_limits.py"
_MOVE = f"{_AGENT}/test_what_settings_move.py"
_FIELDS = f"{_OPERATOR}/test_operator_every_field.py"
_OPERATORS = f"{_OPERATOR}/test_operator_every_setting.py"
_PODS = f"{_OPERATOR}/test_operator_pod_settings.py"
_RENDER = f"{_OPERATOR}/test_operator_render.py"
_ARGUMENTS = f"{_CLIENT}/test_what_arguments_change.py"
_CLIENTS = f"{_CLIENT}/test_client.py"
_CONNECTION = f"{_CLIENT}/test_connection.py"
_CORE = f"{_CLIENT}/test_core.py"
_MEMORY = f"{_CLIENT}/test_memory.py"
_TIMELINE = f"{_AGENT}/test_room_timeline.py"
_VLLM = "tests/engines/test_engine_vllm.py"
_CHART = "e2e/test_chart_values.py"

Shown = dict[str, tuple[str, ...]]

_PAGES = f"{_AS_SET}::test_pages_are_served_by_https_at_the_given_address_to_who_has_the_token"
_PORT = f"{_AS_SET}::test_a_worker_listens_at_the_given_address_and_port"
_TRACES = (
    f"{_AGENT}/test_room_traces.py::test_a_room_of_two_agents_becomes_one_trace_with_the_steps_of_their_own_timeline"
)
_KIND_OF_MEMORY = (
    f"{_AGENT}/test_prepared_direct.py::test_lanes_ring_and_the_memory_of_probes_are_of_the_kind_that_the_settings_name"
)
_BY_NAME = (
    f"{_AGENT}/test_agent_control.py::test_who_has_a_key_is_answered_and_one_of_another_deployment_is_refused_by_name"
)
_SLAB_MINIMUM = f"{_CHANGE}::test_slabs_are_not_cut_below_their_minimum_which_gpus_have_of_their_own"
_WINDOW = f"{_CHANGE}::test_a_writer_is_granted_its_window_at_once_which_gpus_have_of_their_own"
_LANES = f"{_MOVE}::test_as_many_threads_scatter_and_as_many_lanes_write_as_are_set"
_WAITS_AGAIN = (
    f"{_AGENT}/test_restarts.py::test_an_engine_whose_worker_dies_again_and_again_waits_as_long_as_its_agent_is_set"
)
_LONGEST_WAIT = f"{_AGENT}/test_restarts.py::test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long_up_to_the_longest_wait"
_LONGEST_WAIT_SET = (
    f"{_AGENT}/test_restarts.py::test_an_engine_waits_no_longer_and_no_shorter_than_the_longest_wait_of_its_agent"
)
_OPEN_PORTS = (
    (
        f"{_AGENT}/test_agent_mooncake.py::"
        "test_an_agent_whose_data_ports_others_reach_does_not_start_and_says_why_and_the_way_out"
    ),
    f"{_AGENT}/test_settings.py::test_settings_that_contradict_each_other_are_refused",
    f"{_AGENT}/test_settings.py::test_data_ports_are_taken_where_nobody_else_reaches_them_or_somebody_accepts_it",
)
_BACKENDS = (
    f"{_AGENT}/test_agent_layouts.py::test_every_byte_arrives_once_between_layouts_of_each_kind_over_every_transport",
)
_FLIPS = f"{_AGENT}/test_agent_crossover.py::test_the_table_flips_the_way_by_the_length_of_runs_and_the_bytes_for_the_wire_that_was_found"
_HOSTS = f"{_AGENT}/test_host_pools.py::test_a_deployment_with_host_memory_is_the_default_of_claims"
_DIGESTS = (f"{_AGENT}/test_digests.py::test_a_deployment_that_asks_for_digests_compares_every_room",)
_STAGING = (
    f"{_CHANGE}::test_staging_is_used_always_or_never_as_it_is_set",
    f"{_AGENT}/test_agent_layouts.py::test_without_staging_the_same_bytes_travel_slice_by_slice",
)
_WIRES = (
    f"{_AGENT}/test_agent_wires.py::test_a_wire_that_was_not_asked_for_fails_the_room_and_peers_wires_and_way_out_are_named",
    f"{_AGENT}/test_data_ports.py::test_no_port_is_open_where_no_allowed_wire_needs_one",
)
_RING = (f"{_CHANGE}::test_the_ring_is_as_large_as_it_is_set_and_without_one_nothing_is_staged",)
_REQUIRED_MPS = (
    f"{_AGENT}/test_mps.py::test_with_gpu_mps_a_worker_that_is_no_client_does_not_start_and_names_directory_and_way_out",
)
_SLABS = (f"{_CHANGE}::test_a_slab_is_no_longer_than_a_lane",)
_CHUNK = (f"{_AS_SET}::test_a_plan_counts_the_writes_of_a_chunk_of_the_set_length",)

_JSON_LINES = f"{_AGENT}/test_agent_logs.py::test_a_failed_room_is_logged_with_room_instance_peers_and_reason"

# The agent's settings, LONGSHORE_ and the name in capitals.
AGENT_SETTINGS: Shown = {
    "config_file": (f"{_AS_SET}::test_an_agent_does_what_its_config_file_says",),
    "deployment": (_BY_NAME,),
    "node": (_PAGES,),
    "run_directory": (f"{_AS_SET}::test_an_agent_says_where_it_is_in_its_run_directory",),
    "keys_directory": (
        f"{_AGENT}/test_agent_control.py::test_who_has_no_key_of_the_deployment_gets_nothing_in",
        f"{_AGENT}/test_key_rotation.py::test_real_agents_of_two_revisions_move_pages_in_both_directions",
    ),
    "bind_host": (_PAGES, _PORT),
    "http_port": (_PAGES,),
    "http_token_file": (_PAGES,),
    "http_certificate_file": (_PAGES,),
    "http_key_file": (_PAGES,),
    "worker_port": (_PORT,),
    "host_network": _OPEN_PORTS,
    "network_policy": _OPEN_PORTS,
    "allow_open_data_path": _OPEN_PORTS,
    "log_level": (f"{_AS_SET}::test_lines_below_the_set_level_are_not_logged",),
    "log_format": (_JSON_LINES,),
    "backend": _BACKENDS,
    "gpu_staging_memory": (_KIND_OF_MEMORY,),
    "gpu_mps": _REQUIRED_MPS,
    "wires": _WIRES,
    "staging": _STAGING,
    "decode_target": (_HOSTS,),
    "digest": _DIGESTS,
    "crossover_file": (_FLIPS,),
    "ring_bytes": (*_RING, f"{_MOVE}::test_a_worker_without_a_ring_is_brought_no_staged_bytes"),
    "ring_extent_bytes": (f"{_MOVE}::test_a_write_is_cut_where_extents_of_the_ring_end",),
    "ring_share_divisor": (f"{_CHANGE}::test_a_room_is_granted_no_more_than_its_share_of_the_ring",),
    "grant_window": (_WINDOW,),
    "gpu_grant_window": (_WINDOW,),
    "scatter_threads": (_LANES,),
    "lane_count": (_LANES, f"{_CHANGE}::test_a_room_is_cut_for_two_slabs_a_lane"),
    "lane_bytes": _SLABS,
    "slab_bytes_min": (_SLAB_MINIMUM,),
    "gpu_slab_bytes_min": (_SLAB_MINIMUM,),
    "slices_batch": (f"{_MOVE}::test_slices_travel_in_writes_of_as_many_as_are_set",),
    "chunk_tokens": _CHUNK,
    "direct": (f"{_AS_SET}::test_engines_of_one_agent_copy_directly_only_where_that_is_set",),
    "lease_s": (f"{_CHANGE}::test_rooms_whose_engine_is_silent_end_with_their_lease",),
    "heartbeat_s": (f"{_CHANGE}::test_a_peer_is_pinged_once_a_heartbeat",),
    "peer_timeout_s": (f"{_CHANGE}::test_a_peer_that_is_silent_for_the_peer_timeout_is_lost",),
    "retry_ms": (f"{_CHANGE}::test_what_is_not_answered_is_said_again_after_its_time",),
    "trailer_deadline_ms": (
        f"{_AGENT}/test_lane_and_link_defects.py::test_bytes_that_never_come_fail_the_room_and_touch_no_page",
        f"{_AGENT}/test_lane_and_link_defects.py::test_a_word_of_arrival_that_comes_before_the_bytes_waits_for_them",
    ),
    "write_timeout_s": (
        f"{_CHANGE}::test_memory_for_ready_tokens_waits_for_bytes_as_long_as_the_write_timeout",
        (
            f"{_AGENT}/test_agent_stuck_writes.py::"
            "test_a_writer_whose_writes_never_end_is_replaced_with_the_reason_and_its_rooms_are_released"
        ),
    ),
    "room_timeout_s": (f"{_CHANGE}::test_a_room_in_which_nothing_happens_fails_after_the_room_timeout",),
    "rooms_max": (f"{_CHANGE}::test_a_worker_takes_as_many_rooms_as_it_is_set_and_is_busy_for_the_next",),
    "ended_rooms_max": (f"{_CHANGE}::test_as_many_ended_rooms_are_remembered_as_are_set",),
    "process_workers_max": (
        f"{_LIMITS}::test_a_process_gets_as_many_workers_as_are_allowed_and_another_one_in_the_place_of_one_that_ended",
    ),
    "user_workers_max": (f"{_LIMITS}::test_the_engines_of_a_user_get_as_many_workers_as_are_allowed",),
    "quarantine_percent": (f"{_MOVE}::test_a_worker_is_replaced_above_the_part_in_quarantine_that_is_set",),
    "spans_max": (f"{_AS_SET}::test_as_many_spans_are_kept_as_are_set",),
    "client_spans": (f"{_TIMELINE}::test_without_the_setting_no_engine_sends_its_steps",),
    "otel": (_TRACES,),
    "self_test_bytes": (f"{_AS_SET}::test_the_self_test_moves_as_many_bytes_as_are_set",),
    "start_limit_s": (f"{_CHANGE}::test_a_worker_may_start_as_long_as_is_set_before_its_agent_is_unready",),
    "drain_s": (
        (
            f"{_AGENT}/test_agent_quarantine.py::"
            "test_a_room_that_does_not_end_within_the_drain_limit_fails_on_both_sides_with_the_cause"
        ),
        (
            f"{_AGENT}/test_agent_quarantine.py::"
            "test_above_a_quarter_a_worker_finishes_what_is_open_takes_nothing_new_and_is_replaced_under_its_engine"
        ),
    ),
    "restart_backoff_min_s": (_WAITS_AGAIN,),
    "restart_backoff_max_s": (_LONGEST_WAIT, _LONGEST_WAIT_SET),
    "force_way": (
        f"{_CHANGE}::test_a_forced_way_is_that_of_every_claim",
        f"{_AGENT}/test_agent_moves_pages.py::test_every_way_carries_the_same_bytes_and_is_the_one_that_is_reported",
    ),
    "loopback_faults": (
        f"{_AGENT}/test_agent_faults.py::test_lost_and_repeated_notices_change_nothing_but_the_count_of_stale_messages",
    ),
}

_LEASE = (
    f"{_OPERATORS}::test_the_lease_is_the_one_that_is_named_in_the_name_that_is_given_and_for_the_time_that_is_set",
)
_WATCHES = (f"{_OPERATORS}::test_one_namespace_or_all_are_watched_and_nodes_where_they_may_be_read",)
_IMAGES = (f"{_OPERATORS}::test_agents_are_of_the_image_that_is_set_where_their_deployment_names_none",)
_SERVED = (f"{_OPERATORS}::test_pages_are_served_where_they_are_set_to_be",)

_JSON_OF_AGENTS = f"{_OPERATORS}::test_agents_log_in_the_form_that_is_set_where_their_deployment_sets_none"
# The operator's settings, LONGSHORE_ and the name in capitals.
_ALLOWS = (f"{_OPERATORS}::test_deployments_get_what_the_settings_allow",)
_PIPES = (f"{_OPERATORS}::test_deployments_with_mps_get_the_directory_that_is_set_under_the_path_that_is_set",)
OPERATOR_SETTINGS: Shown = {
    "namespace": _LEASE,
    "watch_namespace": _WATCHES,
    "identity": _LEASE,
    "lease_name": _LEASE,
    "watch_nodes": (
        *_WATCHES,
        f"{_OPERATOR}/test_operator_decide.py::test_without_nodes_the_roles_agents_are_not_counted",
    ),
    "agent_image": _IMAGES,
    "agent_image_pull_policy": _IMAGES,
    "agent_image_pull_secrets": _IMAGES,
    "agent_runtime_class": _IMAGES,
    "operator_image": _IMAGES,
    "allow": _ALLOWS,
    "allow_capabilities": _ALLOWS,
    "allow_host_paths": _ALLOWS,
    "mps_host_directory": _PIPES,
    "mps_pipe_directory": _PIPES,
    "http_host": _SERVED,
    "http_port": _SERVED,
    "lease_s": (
        *_LEASE,
        (
            f"{_OPERATOR}/test_operator_lease.py::"
            "test_the_second_one_waits_until_it_has_seen_the_lease_unchanged_for_its_duration"
        ),
    ),
    "lease_renew_s": (f"{_OPERATORS}::test_a_lease_is_renewed_after_the_time_that_is_set",),
    "resync_s": (
        f"{_OPERATORS}::test_everything_is_listed_again_after_the_time_that_is_set",
        f"{_OPERATORS}::test_everything_is_looked_at_again_after_the_time_that_is_set",
    ),
    "watch_lag_limit_s": ("e2e/test_operator_faults.py::test_a_watch_that_misses_something_makes_the_operator_unlive",),
    "poll_s": (f"{_OPERATORS}::test_agents_are_asked_again_after_the_time_that_is_set",),
    "poll_timeout_s": (f"{_OPERATORS}::test_an_agent_has_as_long_to_answer_as_is_set",),
    "poll_stale_s": (f"{_OPERATORS}::test_an_answer_counts_for_as_long_as_is_set",),
    "poll_count_max": (f"{_OPERATORS}::test_as_many_agents_are_asked_at_once_as_are_set",),
    "request_timeout_s": (f"{_OPERATORS}::test_a_request_that_is_not_answered_ends_after_the_time_that_is_set",),
    "worker_count": (f"{_OPERATORS}::test_as_many_deployments_are_reconciled_at_once_as_are_set",),
    "log_level": (f"{_OPERATORS}::test_lines_below_the_set_level_are_not_logged",),
    "log_format": (
        f"{_OPERATORS}::test_every_line_is_one_object_where_that_is_set_also_those_of_kopf",
        _JSON_OF_AGENTS,
    ),
}

_LAYOUT = (f"{_FIELDS}::test_engines_of_the_declared_layout_are_taken_in_and_others_refused_by_the_field",)
_PLAN = f"{_FIELDS}::test_the_plan_in_the_status_follows_the_layouts"
_MODEL = (*_LAYOUT, "e2e/test_crd.py::test_what_may_not_change_does_not")
_SETTING = f"{_FIELDS}::test_a_field_becomes_the_setting_of_its_agents"
_POD = f"{_FIELDS}::test_a_field_of_agents_is_seen_in_their_pods"
_UPDATES = (f"{_RENDER}::test_as_many_agents_are_away_at_a_time_as_the_spec_says",)
_TOLERATED = (f"{_FIELDS}::test_agents_tolerate_what_is_listed",)
_OVERRIDE = f"{_PODS}::test_a_role_overrides_the_settings_of_all_agents_entry_by_entry"
_ALLOWED = f"{_PODS}::test_only_the_administrator_allows_a_part_of_the_node"
_PASSED_ON = (f"{_PODS}::test_fields_of_pods_are_where_kubernetes_has_them", _OVERRIDE)
_PASSED_ON_NAMES = (
    "annotations labels env.name env.value priorityClassName resources.limits resources.requests "
    "resources.claims.name resources.claims.request resourceClaims.name resourceClaims.resourceClaimName "
    "resourceClaims.resourceClaimTemplateName securityContext.capabilities.add "
    "securityContext.seLinuxOptions.level securityContext.seLinuxOptions.type volumes.name "
    "volumes.configMap volumes.secret volumes.emptyDir volumes.projected volumes.downwardAPI volumes.csi "
    "volumes.hostPath volumeMounts.name volumeMounts.mountPath volumeMounts.readOnly volumeMounts.subPath"
)
# Fields of pods, in `agents` and in both roles.
_POD_SETTINGS: Shown = {
    "gpuAccess": (
        f"{_PODS}::test_agents_see_all_gpus_by_the_nvidia_runtime",
        f"{_PODS}::test_agents_see_all_gpus_by_cdi",
    ),
    **dict.fromkeys(_PASSED_ON_NAMES.split(), _PASSED_ON),
    "runtimeClassName": (_OVERRIDE,),
    "guaranteed": (f"{_PODS}::test_one_field_makes_pods_guaranteed",),
    **{f"tolerations.{name}": _TOLERATED for name in ("key", "operator", "value", "effect", "tolerationSeconds")},
}
_EXPECTED = (f"{_FIELDS}::test_expected_instances_are_counted_and_missed",)
_SELECTED = (
    f"{_FIELDS}::test_agents_run_on_the_nodes_that_a_selector_picks",
    "e2e/test_operator_lifecycle.py::test_a_deployment_becomes_agents_on_the_nodes_of_both_roles",
)
_HOST_POOLS = (
    f"{_CLIENT}/test_host_memory.py::test_pools_and_claims_go_to_the_worker_of_their_memory",
    f"{_AGENT}/test_host_pools.py::test_rooms_into_both_memories_at_once_arrive_to_the_token",
)


def _role(name: str) -> Shown:
    return {
        f"{name}.instances": _EXPECTED,
        f"{name}.tensorParallel": (*_LAYOUT, _PLAN),
        f"{name}.pipelineParallel": _LAYOUT,
        f"{name}.dataParallel": _LAYOUT,
        f"{name}.pageSize": _LAYOUT,
        f"{name}.pageOrder": _LAYOUT,
        f"{name}.nodeSelector": _SELECTED,
        f"{name}.ranksPerNode": (f"{_PODS}::test_the_ranks_of_a_node_limit_its_agents_memory",),
    }


# Fields of a DisaggDeployment, below `spec`.
RESOURCE_FIELDS: Shown = {
    "paused": (
        f"{_OPERATOR}/test_operator_decide.py::test_nothing_is_written_while_paused_and_what_waits_is_named",
        "e2e/test_operator_rollouts.py::test_nothing_changes_while_paused_and_all_of_it_after",
    ),
    "model.attention": (
        *_MODEL,
        f"{_AGENT}/test_agent_layouts.py::test_a_latent_travels_in_whole_pages_from_one_writer_to_each_reader",
    ),
    "model.layers": (*_MODEL, _PLAN),
    "model.kvHeads": _MODEL,
    "model.headDim": _MODEL,
    "model.dtype": _MODEL,
    **_role("prefill"),
    "prefill.staging.bufferSize": (_SETTING, _PLAN, *_SLABS),
    "prefill.staging.lanes": (_SETTING, _LANES),
    **_role("decode"),
    "decode.target": (_SETTING, _HOSTS),
    "decode.staging.poolSize": (_SETTING, *_RING),
    "transfer.backend": (_SETTING, *_BACKENDS),
    "transfer.staging": (_SETTING, _PLAN, *_STAGING),
    "transfer.chunkTokens": (_SETTING, _PLAN),
    "transfer.wires": (
        _SETTING,
        *_WIRES,
        (
            f"{_OPERATOR}/test_operator_decide.py::"
            "test_a_pair_that_is_refused_for_its_wire_is_named_with_the_wire_the_allowed_ones_and_the_way_out"
        ),
    ),
    "integrity.digest": (_SETTING, *_DIGESTS),
    "gpu.mps": (
        _SETTING,
        *_REQUIRED_MPS,
        f"{_PODS}::test_with_gpu_mps_agents_and_engines_find_the_pipes_of_the_nodes_daemon",
    ),
    **{f"prefill.agents.{name}": tests for name, tests in _POD_SETTINGS.items()},
    **{f"decode.agents.{name}": tests for name, tests in _POD_SETTINGS.items()},
    **{f"agents.{name}": tests for name, tests in _POD_SETTINGS.items()},
    "agents.image": (_POD, _ALLOWED),
    "agents.hostNetwork": (_POD, _SETTING, *_OPEN_PORTS),
    "agents.hostIPC": (_POD, _ALLOWED),
    "agents.allowOpenDataPath": (
        _SETTING,
        f"{_WIRE}/test_manifest.py::test_data_ports_that_others_reach_are_taken_where_the_manifest_accepts_it",
        *_OPEN_PORTS,
    ),
    "agents.networkPolicy": (
        _POD,
        _SETTING,
        f"{_WIRE}/test_manifest.py::test_what_keeps_others_from_data_ports_is_told_to_the_agents",
        f"{_RENDER}::test_only_agents_of_the_deployment_reach_each_others_data_path",
    ),
    "agents.podMonitorLabels": (
        "e2e/test_operator_lifecycle.py::test_a_pod_monitor_is_made_where_its_kind_is_and_its_absence_is_told",
    ),
    "agents.podMonitor": (
        _POD,
        "e2e/test_operator_lifecycle.py::test_a_pod_monitor_is_made_where_its_kind_is_and_its_absence_is_told",
    ),
    "agents.httpPort": (_POD, _SETTING, _PAGES),
    "agents.workerPort": (_POD, _SETTING, _PORT),
    "agents.keysRevision": (
        f"{_FIELDS}::test_a_raised_revision_of_keys_asks_for_new_ones",
        "e2e/test_operator_lifecycle.py::test_keys_are_made_once_and_anew_on_request",
    ),
    "agents.updateStrategy.type": (
        *_UPDATES,
        "e2e/test_operator_rollouts.py::test_on_delete_agents_stay_until_their_pods_are_deleted",
    ),
    "agents.updateStrategy.rollingUpdate.maxUnavailable": _UPDATES,
}

_MEANT = f"{_ARGUMENTS}::test_another_room_half_instance_or_pool_is_not_meant"
_PATIENT = f"{_ARGUMENTS}::test_a_call_that_is_not_answered_waits_as_long_as_it_is_told"
_SAYS_WHO = f"{_ARGUMENTS}::test_an_engine_says_who_it_is_where_its_pages_are_and_what_it_does"
_OFFERED = f"{_CLIENTS}::test_an_offer_and_a_claim_arrive_as_they_were_made"
_MOVED = f"{_AGENT}/test_agent_layouts.py::test_every_byte_arrives_once_between_any_two_layouts_and_with_any_prefix"
_OF_POOL = f"{_AGENT}/test_agent_pools.py::test_a_room_moves_pages_of_the_pool_that_it_names_and_of_no_other"
_REGISTERED = f"{_ARGUMENTS}::test_a_pool_is_registered_under_its_number_with_its_geometry"
_PLANES = f"{_ARGUMENTS}::test_each_argument_of_a_geometry_moves_its_planes"
_NAMED = f"{_ARGUMENTS}::test_a_region_has_the_name_and_the_length_that_are_given"
_HANDLE = (
    "tests/gpu/test_engine_memory_on_gpu.py::test_what_an_engine_wrote_is_read_and_what_we_write_it_sees",
    f"{_CLIENT}/test_cuda_regions.py::test_only_a_cuda_tensor_has_a_handle",
)

# Arguments of the client's public calls: those of `longshore_client`, of its Client, and of `longshore_client.cuda`.
CLIENT_ARGUMENTS: Shown = {
    "connect.path": (
        f"{_CONNECTION}::test_a_client_is_welcomed_and_knows_its_worker",
        f"{_CONNECTION}::test_without_a_path_the_environment_names_the_socket_and_else_it_is_that_of_an_agent_without_deployment",
        f"{_CORE}::test_no_agent_is_named_with_its_path_and_one_that_comes_later_is_found",
    ),
    "connect.instance": (_SAYS_WHO,),
    "connect.layout": (*_LAYOUT, _MOVED),
    "connect.device": (
        _SAYS_WHO,
        (
            f"{_AGENT}/test_worker_start.py::"
            "test_an_engine_on_a_gpu_that_its_node_does_not_have_is_refused_by_name_and_its_worker_is_not_started_again"
        ),
    ),
    "connect.roles": (
        _SAYS_WHO,
        f"{_AGENT}/test_requests_of_an_engine.py::test_page_lists_are_checked_by_the_worker_itself_whatever_the_client_did",
    ),
    "connect.host_layout": _HOST_POOLS,
    "connect.timeout_s": (f"{_VLLM}::test_an_engine_waits_for_its_agent_as_long_as_is_set",),
    "send.room": (_OFFERED, _MEANT),
    "send.pages": (_OFFERED, _MOVED),
    "send.first_token": (_OFFERED, _MOVED),
    "send.end_token": (_OFFERED, _MOVED),
    "send.last": (
        f"{_AGENT}/test_agent_control.py::test_a_chunk_after_the_last_is_refused_and_the_room_still_arrives",
        f"{_AGENT}/test_agent_control.py::test_halves_that_state_different_totals_fail_on_both_sides_and_name_both",
    ),
    "send.pool": (_OF_POOL,),
    "send.timeout_s": (_PATIENT,),
    "receive.room": (_OFFERED, _MOVED),
    "receive.endpoint": (_OFFERED, _MOVED),
    "receive.pages": (_OFFERED, _MOVED),
    "receive.first_token": (
        f"{_AGENT}/test_agent_layouts.py::test_only_what_the_target_lacks_is_sent_wherever_its_prefix_ends",
    ),
    "receive.end_token": (
        _MOVED,
        f"{_AGENT}/test_agent_control.py::test_halves_that_state_different_totals_fail_on_both_sides_and_name_both",
    ),
    "receive.pool": (_OF_POOL,),
    "receive.memory": (
        *_HOST_POOLS,
        f"{_CLIENT}/test_host_memory.py::test_a_claim_that_names_no_memory_gets_the_deployments",
    ),
    "receive.digest": (
        f"{_AGENT}/test_digests.py::test_real_agents_compare_every_slab_of_a_room_that_asks_for_it_and_of_no_other",
    ),
    "receive.timeout_s": (_PATIENT,),
    "cancel.room": (_MEANT,),
    "cancel.half": (_MEANT,),
    "cancel.instance": (_MEANT,),
    "cancel.pool": (_MEANT,),
    "cancel.timeout_s": (_PATIENT,),
    "wait.room": (_MEANT,),
    "wait.half": (_MEANT,),
    "wait.instance": (_MEANT,),
    "wait.kinds": (f"{_ARGUMENTS}::test_an_event_of_another_kind_is_not_waited_for",),
    "wait.timeout_s": (f"{_CLIENTS}::test_a_wait_that_gets_nothing_is_a_typed_error",),
    "wait.pool": (_MEANT, _OF_POOL),
    "is_open.room": (_MEANT,),
    "is_open.half": (_MEANT,),
    "is_open.instance": (_MEANT,),
    "is_open.pool": (_MEANT,),
    "poll.timeout_s": (f"{_CONNECTION}::test_poll_waits_for_an_event_and_ends_when_the_client_is_closed",),
    "endpoint.timeout_s": (f"{_CLIENTS}::test_the_endpoint_is_returned_once_every_rank_is_there",),
    "register_pool.pool": (_REGISTERED, _OF_POOL),
    "register_pool.geometry": (_REGISTERED, _MOVED),
    "register_pool.regions": (f"{_CONNECTION}::test_the_regions_of_a_pool_arrive_and_are_the_same_memory",),
    "register_pool.memory": _HOST_POOLS,
    "register_pool.timeout_s": (_PATIENT,),
    "unregister_pool.pool": (_OF_POOL,),
    "unregister_pool.memory": _HOST_POOLS,
    "unregister_pool.timeout_s": (_PATIENT,),
    "pool_geometry.layout": (f"{_MEMORY}::test_the_plain_geometry_addresses_each_element_of_a_contiguous_tensor",),
    "pool_geometry.page_count": (_PLANES,),
    "pool_geometry.offset": (_PLANES,),
    "pool_geometry.order": (_PLANES,),
    "pool_geometry.region_bytes": (_PLANES,),
    "create_region.length_bytes": (_NAMED,),
    "create_region.name": (_NAMED,),
    "torch_region.tensor": (f"{_MEMORY}::test_a_torch_storage_is_shared_in_place_and_its_views_follow",),
    "device_region.tensor": _HANDLE,
    "device_name.tensor": _HANDLE,
}

# Keys of vLLM's `kv_connector_extra_config`.
VLLM_OPTIONS: Shown = {
    "socket": (f"{_VLLM}::test_a_prompt_goes_from_one_engines_blocks_to_the_others",),
    "transfer_limit_s": (f"{_VLLM}::test_a_transfer_that_is_not_over_within_the_set_limit_is_given_up",),
    "connect_limit_s": (f"{_VLLM}::test_an_engine_waits_for_its_agent_as_long_as_is_set",),
    "pages": (f"{_VLLM}::test_an_engine_shares_tokens_if_they_are_wanted_and_says_so_in_its_handover",),
}

_GIVEN = (f"{_CHART}::test_labels_and_annotations_of_rules_and_dashboard_are_those_that_are_given",)
_VALUE = (f"{_CHART}::test_a_value_changes_what_is_installed",)

# Values of the chart; `e2e/test_chart_values.py` has a case for each.
CHART_VALUES: Shown = {
    **{f"image.{name}": _VALUE for name in ("repository", "tag", "digest", "pullPolicy")},
    "imagePullSecrets": _VALUE,
    "mode": (*_VALUE, "e2e/test_chart.py::test_the_rights_of_either_mode_are_enough"),
    "watchNodes": _VALUE,
    "crds.install": _VALUE,
    "agent.image": (*_VALUE, "e2e/test_helm_test.py::test_helm_test_fails_where_agents_do_not_become_ready"),
    "agent.pullPolicy": _VALUE,
    "agent.pullSecrets": _VALUE,
    "agent.runtimeClassName": _VALUE,
    **{
        f"allow.{name}": _VALUE
        for name in ("image", "hostNetwork", "hostIPC", "noNetworkPolicy", "capabilities", "hostPaths")
    },
    **{f"gpu.mps.{name}": _VALUE for name in ("hostDirectory", "pipeDirectory")},
    **dict.fromkeys(("aggregateToEdit", "inject.enabled", "replicas", "logFormat", "logLevel", "settings"), _VALUE),
    **dict.fromkeys(("resources.requests.cpu", "resources.requests.memory", "resources.limits.memory"), _VALUE),
    **{f"resources.{name}.ephemeral-storage": _VALUE for name in ("requests", "limits")},
    **dict.fromkeys(("nodeSelector", "tolerations", "affinity", "priorityClassName"), _VALUE),
    "podDisruptionBudget.enabled": _VALUE,
    **dict.fromkeys(("networkPolicy.enabled", "test.nodeSelector", "test.verify.deployment"), _VALUE),
    "test.verify.namespace": _VALUE,
    "test.limitSeconds": (*_VALUE, "e2e/test_helm_test.py::test_helm_test_fails_where_agents_do_not_become_ready"),
    **{f"monitoring.{name}": _VALUE for name in ("rules.enabled", "rules.runbookUrl", "dashboard.enabled")},
    **{f"monitoring.{name}": _GIVEN for name in ("rules.labels", "dashboard.annotations")},
    "monitoring.dashboard.labels.grafana_dashboard": _GIVEN,
    "podMonitor.enabled": _VALUE,
    "podMonitor.labels": (f"{_CHART}::test_labels_of_the_monitor_are_those_that_are_given",),
}
