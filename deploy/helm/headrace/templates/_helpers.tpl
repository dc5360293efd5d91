{{- define "headrace.name" -}}
{{- $name := ternary .Release.Name (printf "%s-headrace" .Release.Name) (contains "headrace" .Release.Name) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "headrace.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end -}}

{{- define "headrace.secret" -}}
{{ default (include "headrace.name" .) .Values.auth.existingSecret }}
{{- end -}}

{{- /* Environment variable from the Secret: name, key. */ -}}
{{- define "headrace.secretEnv" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ include "headrace.secret" .root }}
      key: {{ .key }}
{{- end -}}

{{- define "headrace.prefillPod" -}}
{{ printf "%s-prefill" (include "headrace.name" .) }}
{{- end -}}

{{- define "headrace.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false  # variables such as HEADRACE_PORT, from the names of services
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "headrace.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- /* Volumes of every server: models and caches, temporary files. */ -}}
{{- define "headrace.volumes" -}}
- name: models
{{- if .root.Values.models.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .root.Values.models.existingClaim }}
    readOnly: {{ .root.Values.models.readOnly }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .root.Values.models.sizeLimit }}
{{- end }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .root.Values.tmp.sizeLimit }}
{{- if .root.Values.models.readOnly }}
- name: cache
  emptyDir:
    sizeLimit: {{ .root.Values.models.sizeLimit }}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headrace.mounts" -}}
- name: models
  mountPath: /models
  readOnly: {{ .root.Values.models.readOnly }}
- name: tmp
  mountPath: /tmp
{{- if .root.Values.models.readOnly }}
- name: cache
  mountPath: /cache
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headrace.cacheEnv" -}}
{{- if .root.Values.models.readOnly }}
- name: XDG_CACHE_HOME
  value: /cache
{{- end }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Alive: /health. Would serve: /ready. A drain turns /ready at once. */ -}}
{{- define "headrace.probes" -}}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  failureThreshold: 36
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 6
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 2
  timeoutSeconds: 4
  failureThreshold: 1
lifecycle:
  preStop:
    exec:
      command: ["sleep", {{ .root.Values.preStopSeconds | quote }}]
{{- end -}}

{{- define "headrace.grace" -}}
{{ add .Values.preStopSeconds .Values.drainTimeout 10 }}
{{- end -}}

{{- /* Where pods run. */ -}}
{{- define "headrace.placement" -}}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The container that runs headrace serve, of either role. */ -}}
{{- define "headrace.server" -}}
- name: server
  image: {{ include "headrace.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    - serve
    - --role={{ .role }}
    - --model={{ .root.Values.model }}
    - --dtype={{ .root.Values.dtype }}
    - --host=0.0.0.0
    - --port={{ .values.port }}
    - --drain-timeout={{ .root.Values.drainTimeout }}
    - --transfer-backends={{ .root.Values.transferBackends }}
    {{- if eq .role "prefill" }}
    - --transfer-host=0.0.0.0
    - --control-port={{ .values.controlPort }}
    - --data-port={{ .values.dataPort }}
    {{- if .root.Values.trustedNetwork }}
    - --trusted-network
    {{- end }}
    {{- with .values.bootstrapPort }}
    - --bootstrap-port={{ . }}
    {{- end }}
    {{- if gt (int .values.ranks) 1 }}
    - --stages=external
    - --stage-host=0.0.0.0
    - --stage-port={{ .values.stagePort }}
    {{- end }}
    {{- else }}
    {{- $prefill := include "headrace.prefillPod" .root }}
    {{- range $number := until (int .root.Values.prefill.replicas) }}
    - --prefill=http://{{ $prefill }}-{{ $number }}.{{ $prefill }}:{{ $.root.Values.prefill.port }}
    {{- end }}
    {{- end }}
    {{- range .values.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "headrace.secretEnv" (dict "root" .root "name" "HEADRACE_API_KEY" "key" "api-key") | nindent 4 }}
    {{- if eq .role "decode" }}
    {{- include "headrace.secretEnv" (dict "root" .root "name" "HEADRACE_PREFILL_API_KEY" "key" "api-key") | nindent 4 }}
    {{- else if gt (int .values.ranks) 1 }}
    {{- include "headrace.secretEnv" (dict "root" .root "name" "HEADRACE_STAGE_KEY" "key" "stage-key") | nindent 4 }}
    {{- end }}
    {{- with include "headrace.cacheEnv" . | trim }}{{ . | nindent 4 }}{{ end }}
  ports:
    - name: http
      containerPort: {{ .values.port }}
    {{- if eq .role "prefill" }}
    - name: control
      containerPort: {{ .values.controlPort }}
    {{- if eq (int .values.ranks) 1 }}
    - name: data
      containerPort: {{ .values.dataPort }}
    {{- else }}
    - name: stages
      containerPort: {{ .values.stagePort }}
    {{- end }}
    {{- with .values.bootstrapPort }}
    - name: bootstrap
      containerPort: {{ . }}
    {{- end }}
    {{- end }}
  {{- include "headrace.probes" . | nindent 2 }}
  {{- include "headrace.containerSecurity" . | nindent 2 }}
  {{- if or (eq .role "decode") (eq (int .values.ranks) 1) }}
  resources:
    {{- toYaml .values.resources | nindent 4 }}
  {{- else }}
  resources:
    requests: {cpu: "1", memory: 2Gi}
    limits: {memory: 2Gi}
  {{- end }}
  volumeMounts:
    {{- include "headrace.mounts" . | nindent 4 }}
{{- end -}}

{{- /* The container of one rank: rank and group size come from the LeaderWorkerSet. */ -}}
{{- define "headrace.rank" -}}
- name: rank
  image: {{ include "headrace.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    - stage
    - --scheduler=tcp://$(LWS_LEADER_ADDRESS):{{ .values.stagePort }}
    - --transfer-host=$(POD_IP)
    - --data-port={{ .values.dataPort }}
  env:
    - name: POD_IP
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
    {{- include "headrace.secretEnv" (dict "root" .root "name" "HEADRACE_STAGE_KEY" "key" "stage-key") | nindent 4 }}
    {{- with include "headrace.cacheEnv" . | trim }}{{ . | nindent 4 }}{{ end }}
  ports:
    - name: data
      containerPort: {{ .values.dataPort }}
  # All containers of a pod are told to end at once: a rank waits for its server's drain, at whose end the server ends it.
  lifecycle:
    preStop:
      exec:
        command: ["sleep", {{ add .root.Values.preStopSeconds .root.Values.drainTimeout | quote }}]
  {{- include "headrace.containerSecurity" . | nindent 2 }}
  resources:
    {{- toYaml .values.resources | nindent 4 }}
  volumeMounts:
    {{- include "headrace.mounts" . | nindent 4 }}
{{- end -}}
