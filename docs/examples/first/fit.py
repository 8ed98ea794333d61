import keras
from sklearn.datasets import load_digits

import mpistrat.integrations.keras

strategy = mpistrat.MultiWorkerMirroredStrategy()
mpistrat.experimental_set_strategy(strategy)
keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")])
model.compile("adam", "sparse_categorical_crossentropy")
history = model.fit(x / 16, y, batch_size=64, epochs=5, shuffle=False, verbose=0).history
if strategy.is_chief:
    print(f"loss {history['loss'][-1]:.4f}")
