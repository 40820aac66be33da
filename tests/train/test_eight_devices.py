"""Training on several devices: in a process that has eight."""

from tests.devices import pass_on_eight_devices


def test_steps_and_checkpoints_on_meshes() -> None:
    pass_on_eight_devices("tests/train/eight_devices.py")
