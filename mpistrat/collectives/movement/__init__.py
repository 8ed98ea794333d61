"""Collectives that move values without combining them: between all ranks, from one, or to one."""
