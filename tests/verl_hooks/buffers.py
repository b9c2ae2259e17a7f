"""The replay buffers."""

from tests.verl_hooks.hook import Hook

_BUFFER = "trainer.ppo.v1.replay_buffer:ReplayBuffer"

BUFFERS = (
    Hook(
        f"{_BUFFER}.__init__",
        "samplers/replay_buffer.py: what our trainer gives, and what it reads",
        says=(
            "self.partitions:",
            "self.pending_keys:",
            "self.running_keys:",
            "self.finished_keys:",
            "self.failure_keys:",
            "self.prompt_global_steps:",
            "self._dapo_classification_cache:",
        ),
        takes=(
            *("trainer_mode", "trainer_config", "max_off_policy_threshold"),
            *("max_off_policy_strategy", "sampler_kwargs", "poll_interval", "refill_fn"),
            *("filter_groups_metric", "train_batch_size", "gen_batch_size"),
            *("max_inflight_gen_batches", "sync_refill_failed_groups"),
        ),
    ),
    Hook(
        f"{_BUFFER}.sample",
        "samplers/replay_buffer.py: enough means every quota is full; two for a filtered group",
        says=(
            "self._sync_metadata_from_transfer_queue()",
            "self._terminal_eviction_reasons(global_steps, partition_id)",
            "self._evict_terminal_groups(",
            "self._sampleable_terminal_keys(partition_id, eviction_reasons)",
            "len(sampleable_keys) >= batch_size",
            "self.refill_fn(failed_count)",
            "refill_credit += 2 * dapo_count + failed_count",
            "self._select_prompt_uids(",
        ),
        takes=("global_steps", "partition_id", "batch_size"),
    ),
    Hook(
        f"{_BUFFER}Async._has_enough_samples",
        "samplers/replay_buffer.py: enough means every quota is full",
        says=("len(sampleable_keys) >= batch_size",),
    ),
    Hook(
        f"{_BUFFER}Async.wait_for_sampleable",
        "samplers/replay_buffer.py: one new prompt for each evicted group",
        says=("self.refill_fn(len(evicted_uids))",),
        takes=("global_steps", "partition_id", "target_count"),
    ),
    Hook(
        f"{_BUFFER}Async.get_sampleable_count",
        "samplers/replay_buffer.py",
        takes=("global_steps", "partition_id"),
    ),
    Hook(
        f"{_BUFFER}._sync_metadata_from_transfer_queue",
        "samplers/queue_view.py: what a group that ended changes",
        says=(
            'tag.get("is_prompt", False)',
            'case "finished":',
            'case "failure":',
            "partition[key].update(tag)",
        ),
    ),
    Hook(
        f"{_BUFFER}._clear_groups",
        "samplers/queue_view.py: it drops the groups of `partitions` that it is shown",
        says=(
            "for key in self.partitions[partition_id]",
            "del self.partitions[partition_id][key]",
            "status_keys[partition_id].difference_update(uids)",
        ),
    ),
    Hook(
        f"{_BUFFER}._materialize_batch",
        "samplers/queue_view.py: the batch is made of the groups in the snapshot",
        says=("for key, tag in partition_snapshot.items():",),
        takes=("partition_id", "selected_prompt_uids", "partition_snapshot"),
    ),
    Hook(
        f"{_BUFFER}Async._stale_terminal_keys",
        "samplers/replay_buffer.py: a source may have a lower bound",
        says=("- prompt_global_steps.get(uid, global_steps) + 1 > self.max_off_policy_threshold",),
        takes=("global_steps", "partition_id"),
    ),
    Hook(
        f"{_BUFFER}._dapo_filtered_keys",
        "samplers/replay_buffer.py: a verdict is the shared value, None for a group that stays",
        says=(
            'partition_id == "val" or self.filter_groups_metric is None',
            'key.split("_")[0]',
            '["rm_scores"] if use_canonical_reward else ["extra_fields"]',
            'extra_fields.get("reward_extra_info", {})',
            "classification_cache[uid] =",
            "return set(filtered_rewards), Counter(",
        ),
    ),
    Hook(
        f"{_BUFFER}._terminal_eviction_reasons",
        "samplers/replay_buffer.py: failed means no trajectory at all, and ours is stricter",
        says=(
            "if self.sync_refill_failed_groups:",
            "self.failure_keys[partition_id] - materializable_uids",
            "return set(), dapo_uids, failed_uids, dapo_counts",
        ),
    ),
    Hook(
        f"{_BUFFER}._evict_terminal_groups",
        "samplers/replay_buffer.py",
        says=(
            "stale_uids | dapo_uids | failed_uids",
            "self._clear_groups(partition_id, evicted_uids)",
        ),
    ),
    Hook(
        f"{_BUFFER}._clear_groups",
        "samplers/replay_buffer.py: the draws past the last trained one are forgotten by it",
        says=('key.split("_")[0] in uids', "tq.kv_clear("),
        takes=("partition_id", "uids"),
    ),
    Hook(
        f"{_BUFFER}._select_prompt_uids",
        "samplers/replay_buffer.py gives uids, rows and steps, oldest first",
        says=("sorted(", "ordered_keys[:batch_size]"),
        takes=("partition_id", "sampleable_keys", "batch_size"),
    ),
    Hook(
        f"{_BUFFER}._wait_for_next_poll",
        "samplers/replay_buffer.py looks more often",
        says=("time.sleep(self.poll_interval)",),
        takes=("partition_id", "last_debug_time"),
    ),
)
