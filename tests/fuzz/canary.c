/* A fault on purpose, for `python -m tests.fuzz self-test`: what begins with "AQ!" makes `look`
   read behind the end of a Python bytes object. A fuzzer that does not follow the edges of compiled
   code does not get there, and one without the address sanitizer does not notice. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *look(PyObject *module, PyObject *data) {
    char *bytes;
    Py_ssize_t size;
    volatile char beyond = 0;
    if (PyBytes_AsStringAndSize(data, &bytes, &size) < 0)
        return NULL;
    if (size > 3 && bytes[0] == 'A')
        if (bytes[1] == 'Q')
            if (bytes[2] == '!')
                beyond = bytes[size + 1]; /* the NUL at bytes[size] is the object's last byte */
    return PyLong_FromLong(beyond);
}

static PyMethodDef methods[] = {{"look", look, METH_O, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fuzz_canary", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_fuzz_canary(void) { return PyModule_Create(&definition); }
