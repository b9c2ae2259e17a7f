"""The trainers of trainer/ppo/v1, their batches and their checkpoints."""

from tests.verl_hooks.hook import Hook

_TRAINER = "agent_loop/training/trainer.py"
_STEPS = "agent_loop/training/optimizer_steps.py"
_ACCOUNTS = "agent_loop/training/accounts.py"
_CHECKPOINTS = "agent_loop/training/checkpoints.py"
_BASE = "trainer.ppo.v1.trainer_base:PPOTrainer"

TRAINER = (
    Hook(
        f"{_BASE}.__init__",
        f"{_TRAINER}: attributes of verl's trainer, and the buffer it builds",
        says=(
            "self.kl_ctrl_in_reward =",
            "self.trainer_mode = self.config.trainer.v1.trainer_mode",
            "self.parameter_sync_step =",
            "self.replay_buffer = self._build_replay_buffer()",
            "self.local_trigger_step = 0",
            "self._restored_tq_prompt_count = 0",
        ),
    ),
    Hook(
        f"{_BASE}._build_replay_buffer",
        "samplers/door.py gives the buffer what verl gives its own, and a custom sampler does not "
        "get",
        says=(
            'self.trainer_mode == "sync"',
            "max_off_policy_threshold=sampler_config.max_off_policy_threshold",
            "refill_fn=self._add_prompts_to_generate",
            "if not has_custom_sampler:",
            "self._resolve_filter_groups_metric()",
        ),
    ),
    Hook(
        f"{_BASE}._init_dataloader",
        f"{_TRAINER} puts the plan's stream in the dataloader's place",
        says=(
            "self.train_dataset = create_rl_dataset(",
            "self.val_dataset = create_rl_dataset(",
            "self.config.data.gen_batch_size = 1",
            "self.train_dataloader = StatefulDataLoader(",
            "self.steps_per_epoch =",
            "self.total_training_steps = total_training_steps",
        ),
    ),
    Hook(
        f"{_BASE}._submit_batch_to_rollout",
        f"{_TRAINER}: prompts under way are marked, and kept for a resume in asynchronous modes",
        says=(
            '{"is_prompt": True, "status": "pending", "global_steps": self.global_steps}',
            'if self.trainer_mode != "sync":',
            "self.agent_loop_manager.generate_sequences(batch)",
        ),
    ),
    Hook(
        f"{_BASE}._add_prompts_to_generate",
        "samplers/door.py: {source: prompts} goes through verl's refill",
        says=("self._next_train_batch(num_prompts)", "self._submit_batch_to_rollout(batch)"),
        takes=("num_prompts",),
    ),
    Hook(
        f"{_BASE}._next_train_batch",
        "samplers/door.py is called in its place",
        says=('tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)',),
        takes=("num_prompts",),
    ),
    Hook(
        f"{_BASE}._fetch_one_gen_batch",
        "samplers/door.py gives a uid that holds source and draw",
        says=("iter(self.train_dataloader)", 'batch_dict["uid"]', "tu.get_tensordict(batch_dict)"),
    ),
    Hook(
        f"{_BASE}.prepare_step",
        f"{_TRAINER}: the one place where a step starts its prompts",
        says=("self._add_batch_to_generate()",),
    ),
    Hook(
        f"{_BASE}._add_async_warmup_batches",
        f"{_TRAINER}: asynchronous modes start them with the prompts of the first step",
        takes=("num_warmup_batches",),
    ),
    Hook(
        f"{_BASE}._step_once",
        f"{_TRAINER}: the order of a step",
        says=(
            "self.replay_buffer.sample(",
            'partition_id="train"',
            'batch.extra_info["temperature"]',
            "self._balance_batch(batch, metrics=metrics)",
            "self._compute_old_log_prob(batch, metrics=metrics)",
            "self._compute_ref_log_prob(batch, metrics=metrics)",
            "self._compute_values(batch, metrics=metrics)",
            "self._compute_advantage(batch, metrics=metrics)",
            "self._update_critic(batch, metrics=metrics)",
            "self._update_actor(batch, metrics=metrics)",
        ),
    ),
    Hook(
        f"{_BASE}.step",
        f"{_ACCOUNTS}: mini-batches of a step are counted by local_trigger_step",
        says=("self.prepare_step()", "self.local_trigger_step = trigger_idx", "self._step_once("),
    ),
    Hook(
        f"{_BASE}.fit",
        f"{_TRAINER}: weights are synchronised after the checkpoint, metrics written after both",
        says=(
            "self.logger = Tracking(",
            "val_metrics = self._validate()",
            "self.on_step_begin()",
            "self.step(metrics, self.timing_raw)",
            "self._save_checkpoint()",
            "self.on_step_end()",
            "self._compute_metrics(",
        ),
        takes=("agent_loop_manager",),
    ),
    Hook(
        f"{_BASE}._balance_batch",
        f"{_STEPS}: it cuts the rows by length alone, so ours lays out the mini-batches",
        says=(
            '"actor", self.actor_rollout_wg',
            "worker_group._query_dispatch_info(role)",
            "max(dp_rank_mapping) + 1",
            "upsample_batch_to_divisible_size(batch,",
            'tag["seq_len"] for tag in batch.tags',
            "batch.reorder(",
        ),
        takes=("batch", "metrics", "logging_prefix", "keep_minibatch"),
    ),
    Hook(
        f"{_BASE}._compute_old_log_prob",
        f"{_STEPS}: a temperature of each row, and the differences of probabilities",
        says=(
            "batch.extra_info.update(",
            '"temperature": self.config.actor_rollout_ref.rollout.temperature',
            "self.actor_rollout_wg.compute_log_prob(batch)",
            "metrics.update(calculate_debug_metrics(data))",
        ),
    ),
    Hook(
        f"{_BASE}._compute_ref_log_prob",
        f"{_STEPS}: a temperature of each row",
        says=(
            '"temperature": self.config.actor_rollout_ref.rollout.temperature',
            "batch.extra_info.update(",
        ),
    ),
    Hook(
        f"{_BASE}._compute_advantage",
        f"{_STEPS} gives it the valid rows only, and remax a baseline that verl does not read",
        says=(
            '"uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs"',
            "self.config.algorithm.use_kl_in_reward",
            "compute_advantage_for_multi_trajectories(",
            "adv_estimator=self.config.algorithm.adv_estimator",
            "config=self.config.algorithm",
            'fields = ["advantages", "returns"]',
            "batch = tq.kv_batch_put(",
        ),
    ),
    Hook(
        "trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories",
        "agent_loop/training/advantage.py: any name but grpo sees every row",
        says=(
            "if adv_estimator != core_algos.AdvantageEstimator.GRPO:",
            "return compute_advantage(",
        ),
    ),
    Hook(
        f"{_BASE}._update_actor",
        f"{_STEPS} says how many rows an update has, and how many of them count",
        says=(
            "self.config.actor_rollout_ref.actor.ppo_mini_batch_size",
            "ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n",
            '"global_batch_size": ppo_mini_batch_size',
            '"mini_batch_size": ppo_mini_batch_size',
            '"dataloader_kwargs": {"shuffle": self.config.actor_rollout_ref.actor.shuffle}',
            '"temperature": self.config.actor_rollout_ref.rollout.temperature',
            "batch.extra_info.update(extra_info)",
        ),
    ),
    Hook(
        f"{_BASE}._update_critic",
        f"{_STEPS} says how many rows an update has",
        says=(
            "ppo_mini_batch_size = self.config.critic.ppo_mini_batch_size",
            "ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n",
        ),
    ),
    Hook(
        f"{_BASE}._save_checkpoint",
        f"{_CHECKPOINTS}, agent_loop/records/run_folder.py and agent_loop/training/retention.py: "
        "names in a checkpoint, written last the tracker; nothing is removed where none is to keep",
        says=(
            'f"global_step_{self.global_steps}"',
            'self.config.trainer.get("max_actor_ckpt_to_keep", None)',
            'self.config.trainer.get("max_critic_ckpt_to_keep", None)',
            '"actor"',
            "max_ckpt_to_keep=max_actor_ckpt_to_keep",
            "max_ckpt_to_keep=max_critic_ckpt_to_keep",
            '"data.pt"',
            "torch.save(self.train_dataloader.state_dict()",
            '"transfer_queue"',
            "latest_checkpointed_iteration.txt",
        ),
    ),
    Hook(
        f"{_BASE}._load_checkpoint",
        f"{_CHECKPOINTS}: the stream's state comes back, restored prompts are counted",
        says=(
            'resume_mode == "disable"',
            'resume_mode == "auto"',
            'resume_mode == "resume_path"',
            "self.train_dataloader.load_state_dict(",
            "self._restored_tq_prompt_count = _count_tq_prompt_groups()",
        ),
    ),
    Hook(
        f"{_BASE}._validate",
        f"{_ACCOUNTS}: the record of a session travels in the rewards of its last row",
        says=(
            "self.val_dataloader",
            'tu.assign_non_tensor_data(batch, "validate", True)',
            "keep only the highest index per session",
            'extra_field.get("reward_extra_info", {})',
            "reward_extra_infos_dict[key].append(value)",
            "self._val_metrics_update(",
        ),
    ),
    Hook(
        "trainer.ppo.metric_utils:process_validation_metrics",
        "agent_loop/records/evaluation_records.py: texts among the rewards are no metrics",
        says=("isinstance(var_vals[0], str)",),
    ),
    Hook(
        f"{_BASE}._val_metrics_update",
        f"{_ACCOUNTS} adds validation by source",
        takes=("data_sources", "sample_uids", "reward_extra_infos_dict", "sample_turns"),
    ),
    Hook(
        f"{_BASE}._compute_metrics",
        f"{_ACCOUNTS} adds its own, and writes the line",
        says=('tag.get("is_padding", False)', 'tag["min_global_steps"]', 'tag["max_global_steps"]'),
        takes=("batch", "metrics", "timing_raw", "global_steps", "epoch"),
    ),
    Hook(
        f"{_BASE}._init_resource_pool_mgr",
        f"{_TRAINER} puts CPU workers in verl's places",
        says=("self.role_worker_mapping",),
    ),
    Hook(
        "trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.__init__",
        "verl_mixed/checks/preflight.py says these before Ray starts",
        says=(
            "train_batch_size == parameter_sync_step * ppo_mini_batch_size",
            "rollout.nnodes > 0",
            "rollout.n_gpus_per_node > 0",
            'checkpoint_engine.backend != "naive"',
        ),
    ),
    Hook(
        "trainer.ppo.padding_utils:upsample_batch_to_divisible_size",
        "agent_loop/training/trained_batch.py: padding rows",
        takes=("batch",),
    ),
    Hook(
        "trainer.ppo.padding_utils",
        "agent_loop/training/trained_batch.py: "
        "padding rows have a mask of zeros, and say what they are",
        says=(
            "response_mask = torch.zeros_like(responses)",
            "is_padding=True",
            'pad_uid = f"pad{uuid.uuid4().hex}"',
            'f"{pad_uid}_{local_idx}_0"',
        ),
    ),
    Hook(
        "trainer.ppo.core_algos:compute_remax_outcome_advantage",
        "agent_loop/training/advantage.py",
        takes=("token_level_rewards", "reward_baselines", "response_mask"),
    ),
    Hook(
        "trainer.ppo.core_algos:get_adv_estimator_fn",
        "agent_loop/training/advantage.py: per_session calls the estimator that the run names",
    ),
    Hook(
        "workers.engine_workers:ActorRolloutRefWorker.set_loss_fn",
        "agent_loop/training/session_loss.py",
        takes=("loss_fn",),
    ),
    Hook(
        "workers.engine_workers:ActorRolloutRefWorker.init_model",
        "agent_loop/training/session_loss.py: the loss that it replaces",
        says=("self.loss_fn = partial(ppo_loss, config=actor_config)",),
    ),
    Hook(
        "workers.utils.losses:ppo_loss",
        "agent_loop/training/session_loss.py: all terms are made of these two",
        takes=("config", "model_output", "data", "dp_group"),
        says=('model_output["log_probs"]', 'model_output.get("entropy", None)'),
    ),
    Hook(
        "trainer.ppo.core_algos:agg_loss",
        f"{_STEPS}: seq-mean losses divide by global_batch_size, token-mean by kept tokens",
        says=("batch_num_tokens", "global_batch_size", "loss_scale_factor"),
    ),
)
