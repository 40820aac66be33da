"""Loading, Orbax's own restore and the plan, on one, two, four by two and eight devices: in a process that has eight."""

from tests.devices import pass_on_eight_devices


def test_checkpoints_load_onto_meshes_as_asked() -> None:
    pass_on_eight_devices("tests/conversion/eight_devices.py")
