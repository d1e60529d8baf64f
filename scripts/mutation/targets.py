"""What mutate.py changes, which tests must notice, and what no test can notice.

The tests of a file are those that touch it, in a fixed order: its own first, cheap ones first,
since the first failure ends a run. A file's list is chosen for all of its mutants, never for one.
Tests that start processes are left out: they take as long as the others together, for the same
code.
"""

FOLDER = "parity_tests"
STARTS_PROCESSES = "not torchrun and not processes"  # for pytest's -k

DATA, TENSOR = "test_data_parallel", "test_tensor_parallel"
HEADS = "test_few_key_value_heads"
TENSOR_2D = "test_tensor_parallel_2d"
SEQUENCE, PIPELINE, ZERO = "test_sequence_parallel", "test_pipeline_parallel", "test_zero"
OPTIMIZER, TRAIN, MODEL, RNG = "test_optimizer", "test_train", "test_model", "test_rng"

STEP = (TRAIN, DATA, TENSOR, SEQUENCE, PIPELINE, ZERO)
TENSORS = (TENSOR, SEQUENCE, MODEL, PIPELINE, ZERO)
SCHEDULES = (
    "test_schedule_check",
    "test_schedule_clock",
    "test_schedule",
    "test_schedule_runs",
)
SUMS = (TENSOR, DATA, SEQUENCE, ZERO, OPTIMIZER)
SHARDS = ("test_zero_options", *SUMS, "test_offload")

ALL_SCHEDULES = "test_pipeline_schedules"

TESTS: dict[str, tuple[str, ...]] = {
    "buckets.py": ("test_buckets", ZERO),
    "offload.py": ("test_offload",),
    "loss.py": (TENSOR, DATA, TRAIN, PIPELINE),
    "optimizer.py": (OPTIMIZER, HEADS, TRAIN, ZERO),
    "rng.py": (RNG, MODEL),
    "collectives.py": SHARDS,
    "overlap.py": ("test_overlap",),
    "parallelize.py": STEP,
    "pipeline.py": ("test_config", "test_memory_floor", ALL_SCHEDULES),
    "plan.py": TENSORS,
    "initialize.py": (MODEL, TENSOR),
    "stages.py": ("test_stages", "test_config", "test_memory_floor"),
    "train.py": STEP,
    "parallel/__init__.py": TENSORS,
    "parallel/data_parallel.py": SUMS,
    "parallel/pipeline_parallel.py": (PIPELINE, ALL_SCHEDULES, SEQUENCE, TRAIN),
    "parallel/sequence_parallel.py": TENSORS,
    "parallel/tensor_parallel.py": (*TENSORS, HEADS),
    "parallel/tensor_parallel_2d.py": (TENSOR_2D,),
    "parallel/zero.py": SHARDS,
    "planner/schedule.py": SCHEDULES,
    "planner/stage_times.py": ("test_stage_times",),
    "schedules/actions.py": SCHEDULES,
    "schedules/check.py": SCHEDULES,
    "schedules/closed_forms.py": SCHEDULES,
    "schedules/csv_files.py": SCHEDULES,
    "schedules/gathers.py": ("test_costs",),
    "schedules/kinds.py": SCHEDULES,
    "schedules/torch_orders.py": SCHEDULES,
}

# id of a mutant: why it changes nothing that a test could see.
EQUIVALENT: dict[str, str] = {
    "train.py:Trainer.compute_gradients:drop-double:af5d64b3": "torch.stack promotes to float64",
    "train.py:Trainer.sum_over_ranks:drop-float:5d8bd0e1": "a tensor times a bool is the same",
    "train.py:Trainer.sum_over_ranks:>>>=:755fe1ef": "the sum over one rank is its own number",
    "train.py:Trainer.own_sum_of_squares:+>-:bd473446": "adds 0 or NaN: the sign is lost in both",
    "optimizer.py:make_optimizer:0>1:4367491b": "what has no gradient rests, of any size",
    "optimizer.py:make_optimizer:True>False:f8eee3f5": "fused is a matter of speed",
    "optimizer.py:clip_gradients:<><=:574f36ca": "at that norm torch multiplies by one",
    "collectives.py:Arrival.wait:negate:515de380": "fully_shard does not read what it returns",
    "rng.py:module:18>19:555038f2": "how many numbers are drawn at once: speed and memory",
    "rng.py:module:1>2:dad41518": "how many numbers are drawn at once: speed and memory",
    "rng.py:normal://>*:a79e8598": "how many numbers are drawn at once: speed and memory",
    "rng.py:_fields_of_runs:1>0:39d8fe2c": "draws a block more, which nobody reads",
    "rng.py:_encipher:bound+1:a0047148": "prepares a key more, which no round takes",
    "stages.py:balance:bound-1:ccce28f5": "the last of the stops is taken",
    "stages.py:balance:+>-:53ae10ca": "the last of the stops is taken",
    "stages.py:balance:1>0:82f8b4f0": "the last of the stops is taken",
    "stages.py:_best_of_rest:bound+1:0f09b05b": "no stop comes after the last item",
    "stages.py:_best_of_rest:bound+1:481d8b4d": "a table more, which nobody reads",
    "parallel/tensor_parallel_2d.py:module:Shard>Replicate:4df24c56": "only Partial is asked for",
    "parallel/tensor_parallel_2d.py:module:0>1:1b1b3816": "only Partial is asked for",
    "parallel/tensor_parallel_2d.py:_LookUp.backward:-1>-2:9d057035": "there is no row -1, nor -2",
}
