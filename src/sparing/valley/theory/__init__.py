"""The paper's small models of why signs matter."""
