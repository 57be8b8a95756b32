"""Integrations with programs that call deepspeed.initialize themselves: Accelerate, Trainer, TRL and others."""
