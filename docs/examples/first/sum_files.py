import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
rows = mpistrat.data.Dataset.from_hdf5("run-*.h5", "velocity").batch(1024)
total = sum(part.sum(axis=0) for part in strategy.experimental_distribute_dataset(rows))
total = strategy.reduce("SUM", total, axis=None)
if strategy.is_chief:  # one of the ranks prints
    print(total)
