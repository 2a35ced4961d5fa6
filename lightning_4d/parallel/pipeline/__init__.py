"""Pipeline parallelism: stages, schedules and the engine that runs a user's step on microbatches."""
