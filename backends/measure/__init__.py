"""Local processes, correctness and times of schedules beside gloo, in nccl-tests' terms (`synth run`)."""
