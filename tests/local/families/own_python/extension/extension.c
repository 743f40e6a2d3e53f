#include <Python.h>

static PyObject *one(PyObject *self, PyObject *arguments) { return PyLong_FromLong(1); }

static PyMethodDef methods[] = {{"one", one, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "extension", NULL, -1, methods};

PyMODINIT_FUNC PyInit_extension(void) { return PyModule_Create(&module); }
